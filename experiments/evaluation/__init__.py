"""Parts of the evaluation binary: what is asked, who answers, and what comes of it."""
