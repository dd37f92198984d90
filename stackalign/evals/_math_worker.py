"""The process in which `math-verify` compares two expressions. Run as a file: it imports nothing of the package.

One JSON line in, `{"gold", "answer", "seconds"}`; one out, `{"equal", "parsed"}`, or `{"died": signal}`. The jobs run
in a fork that is used again and again; a job that takes more processor time than `seconds` ends it (SIGPROF, which
also interrupts native code), memory is capped, and the next fork finds everything imported.
"""

import json
import logging
import os
import resource
import signal
import sys

MEMORY = 3 << 30


def main() -> None:
    """Serves jobs until the input closes. The first line out is "ready", or why there will be no more."""
    replies = os.fdopen(os.dup(1), "w", encoding="ascii")
    os.dup2(2, 1)  # what the libraries print is no reply
    try:
        from math_verify import LatexExtractionConfig, parse, verify
    except ImportError as error:
        print(json.dumps({"error": str(error)}), file=replies, flush=True)
        return
    logging.disable(logging.CRITICAL)
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY if hard < 0 else min(MEMORY, hard), hard))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    sys.set_int_max_str_digits(4000)
    extraction = [LatexExtractionConfig(boxed_match_priority=0)]

    def read(text: str) -> list:
        return parse(
            rf"\boxed{{{text}}}",
            extraction,
            fallback_mode="no_fallback",
            extraction_mode="first_match",
            parsing_timeout=None,
        )

    def equal(gold: str, answer: str) -> dict[str, bool]:
        # Twelve decimals: a rounded decimal is not the exact value.
        parsed = read(answer)
        return {"equal": bool(parsed) and verify(read(gold), parsed, 12, timeout_seconds=None), "parsed": bool(parsed)}

    equal(r"\frac{1}{2}", "x+1")  # builds the parser's tables
    print(json.dumps({"ready": True}), file=replies, flush=True)
    while True:
        child = os.fork()
        if not child:
            serve(equal, replies)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if os.WIFEXITED(status) and os.WEXITSTATUS(status) == 0:  # the input is closed
            return
        died = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
        print(json.dumps({"died": died}), file=replies, flush=True)


def serve(equal, replies) -> None:
    """Answers jobs until the input closes."""
    while line := sys.stdin.buffer.readline():
        job = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, job["seconds"])
        try:
            reply = equal(job["gold"], job["answer"])
        except Exception:
            reply = {"equal": False, "parsed": False}
        signal.setitimer(signal.ITIMER_PROF, 0)
        os.write(replies.fileno(), (json.dumps(reply) + "\n").encode())


if __name__ == "__main__":
    main()
