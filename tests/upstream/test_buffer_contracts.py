"""The undocumented names of redis-py that the buffer uses, in the first tested release and in the newest."""

from __future__ import annotations

import pytest

from async_grpo.utils.private_names import PRIVATE_NAMES
from tests.support.upstream import fail_with_findings, find_release, run_python

PRIVATE = PRIVATE_NAMES["buffer"]


@pytest.mark.slow
@pytest.mark.parametrize("version", [f"{PRIVATE.tested[0]}.0", ""], ids=["first", "newest"])
def test_redis_has_every_name_that_the_buffer_uses(version: str) -> None:
    release = find_release("redis", version)
    program = (
        "import json\n"
        "from async_grpo.utils.private_names import PRIVATE_NAMES, explain_missing\n"
        "names = PRIVATE_NAMES['buffer'].names\n"
        "print(json.dumps([f'{name}: {why}' for name in names if (why := explain_missing(name))]))\n"
    )
    fail_with_findings([release], run_python(program, release))
