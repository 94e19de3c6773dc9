"""`python -m tests.support.buffer_crashes --kills 200 --server-kills 10`: exit code 0 if nothing was lost.

With `--fsync everysec` a death of the server may lose what was acknowledged in the seconds before it; that is no fault.
Journals are kept if there is a fault.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

from async_grpo.staleness import ReplayPolicy, StalenessWindow
from tests.support.buffer_crashes.account import Verdict, is_allowed_by_fsync, judge_run
from tests.support.buffer_crashes.crash_run import crash_run
from tests.support.buffer_crashes.plan import Plan

ENDLESS = 1 << 40
FAULTS_SHOWN = 20


def policy(selector: str = "fifo", *, S: int = 2, P: int = 4, **options: int) -> ReplayPolicy:
    """Make a policy that drops stale groups. The horizon is set after the last kill."""
    window = StalenessWindow(max_staleness=S, groups_per_step=P, horizon=ENDLESS)
    return ReplayPolicy(window, selector=selector, **options)  # type: ignore[arg-type]


POLICIES = {
    "fifo": policy(),
    "windowed_fifo": policy("windowed_fifo", selector_window=5),
    "freshest": policy("freshest"),
    "uniform": policy("uniform", max_uses=2),
}
RETUNED = (policy("freshest", S=1), policy("uniform", S=3, P=3, max_uses=2), policy(S=4), policy(S=1, P=2))


def main() -> int:
    options = _options()
    folder = Path(tempfile.mkdtemp(prefix="crashes-"))
    plan = Plan(
        folder=folder,
        policy=POLICIES[options.policy],
        seed=options.seed,
        kills=options.kills,
        server_kills=options.server_kills,
        fsync=options.fsync,
        pause_s=(0.4 * options.pause_s, 1.6 * options.pause_s),
        retune=RETUNED if options.retune else (),
        cut_bytes=options.cut_bytes,
    )
    started_s = time.monotonic()
    course = crash_run(plan, lambda news: print(f"{time.monotonic() - started_s:5.0f} s  {news}", file=sys.stderr))
    result = judge_run(plan, course)
    is_allowed = is_allowed_by_fsync(plan, course, result.faults)
    print(format_result(plan, result, time.monotonic() - started_s), flush=True)
    if options.json is not None:
        facts = {**asdict(result), **result.by_kind, "explained": is_allowed, "seed": plan.seed}
        options.json.write_text(json.dumps(facts, indent=2) + "\n")
    for fault in result.faults[:FAULTS_SHOWN]:
        print(f"seed {plan.seed}: {fault.kind}: {fault.what}", file=sys.stderr)
    if result.faults and not is_allowed:
        print(f"seed {plan.seed}: the journals are in {plan.journals}", file=sys.stderr)
        return 1
    shutil.rmtree(folder)
    return 0


def format_result(plan: Plan, result: Verdict, duration_s: float) -> str:
    """Format the metrics of a run in a few lines."""
    policy_name = f"{plan.policy.selector}, max_uses {plan.policy.max_uses}{', retuned live' if plan.retune else ''}"
    faults = ", ".join(f"{count} {kind}" for kind, count in result.by_kind.items())
    return (
        f"crash test ({policy_name}): {result.killed} SIGKILLs of workers ({result.killed_in_a_call} in the middle of "
        f"a call), {result.server_killed} of the server (fsync {plan.fsync}): {result.acknowledged:,} groups "
        f"acknowledged, {faults}, {result.again} re-leased, {result.replayed} batches replayed\n"
        f"  {result.trained:,} groups trained, {result.stale} stale, {result.unacknowledged} inserted by callers that "
        f"never knew; {result.took_over} epochs, {result.fenced} trainers fenced; {result.kept_at_the_crash} groups "
        f"kept when all was killed at once; at most {result.most_active} active in {result.looks:,} looks; "
        f"seed {plan.seed}, {duration_s:.0f} s"
    )


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="buffer_crashes", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=200, help="SIGKILLs of workers")
    parser.add_argument("--server-kills", type=int, default=10, help="SIGKILLs of the server")
    parser.add_argument("--fsync", choices=("always", "everysec"), default="always")
    parser.add_argument("--policy", choices=tuple(POLICIES), default="fifo")
    parser.add_argument("--retune", action="store_true", help="change S, P and the selector live")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--pause-s", type=float, default=0.6, help="mean time between two kills")
    parser.add_argument("--cut-bytes", type=int, default=0, help="bytes that the server's file loses per death")
    parser.add_argument("--json", type=Path, default=None, metavar="FILE", help="write the figures here, too")
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
