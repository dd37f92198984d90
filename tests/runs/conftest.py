import pytest

from stackalign.runs import folder


@pytest.fixture
def run(tmp_path):
    with folder.create(tmp_path / "run", {"seed": 0}) as opened:
        yield opened
