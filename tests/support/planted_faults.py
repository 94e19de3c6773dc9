"""Faults that a programmer could make, planted one at a time: do the tests notice?

    python -m tests.support.planted_faults              all faults
    python -m tests.support.planted_faults NAME ...     these faults

It copies the tracked files of the repository to a temporary folder and runs the listed tests there unchanged. Then, for
each fault, it replaces one text in the copy, runs the tests of that fault and prints `caught by TEST` or `SURVIVED`. A
fault whose text is not found exactly once, or whose tests fail without it, is named and does not stop the others. The
last line counts the faults that were caught; the exit code is 1 unless all were. It takes some minutes. The table lists
the tests that should notice a fault, not all that do.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
TEST_TIMEOUT_S = 300
RUN_TIMEOUT_S = 900
PASSED = 0
FAILED = 1
"""Exit codes of pytest; any other one means that the tests could not be run."""


@dataclass(frozen=True)
class Fault:
    """In `file`, `old` stands once and becomes `new`; one of `tests` should fail."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


PLANTED: list[str | tuple[str, ...]] = [
    ("async_grpo/algorithms/losses.py", "tests/unit/async_grpo/algorithms/test_losses.py"),
    "loss_wrong_sign: plain_N = -ratio_N * advantages_N --> plain_N = ratio_N * advantages_N",
    "dual_clip_wrong_side: above_N = (advantages_N < 0) & --> above_N = (advantages_N > 0) &",
    ("async_grpo/algorithms/advantages.py", "tests/unit/async_grpo/algorithms/test_advantages.py"),
    "baseline_with_own_reward: sum(-1, keepdim=True) - 1 --> sum(-1, keepdim=True)",
    "unjudged_in_deviation: squares_B1 / (count_B1 - 1) --> squares_B1 / (values_BG.shape[-1] - 1)",
    ("async_grpo/algorithms/objective.py", "tests/unit/async_grpo/algorithms/test_objective.py"),
    "kl_wrong_sign: logprobs_N - reference_N.detach() --> reference_N.detach() - logprobs_N",
    ("async_grpo/algorithms/aggregation.py", "tests/unit/async_grpo/algorithms/test_aggregation.py"),
    "loss_without_sequence_count: 1.0 / (_sequence_count(tokens_N) * max_tokens) --> torch.tensor(1.0 / max_tokens)",
    ("async_grpo/algorithms/corrections.py", "tests/unit/async_grpo/algorithms/test_corrections.py"),
    "bounds_joined_by_or: is_inside & (values >= low) --> is_inside | (values >= low)",
    ("async_grpo/data/shuffle.py", "tests/unit/async_grpo/data/test_shuffle.py"),
    'every_pass_in_one_order: f"{self._seed}/pass/{number}" --> f"{self._seed}/pass"',
    ("async_grpo/data/prepared_dataset.py", "tests/unit/async_grpo/data/prepare/test_prepare.py"),
    "data_checksum_not_compared: if checksum != facts.xxh3: --> if not checksum:",
    ("async_grpo/data/jsonl.py", "tests/unit/async_grpo/data/test_jsonl_source.py"),
    "held_out_prompts_trained: self._drop_prompts_of(of_run, rows, ALSO_HELD_OUT) --> rows",
    ("async_grpo/models/tiny/arithmetic.py", "tests/unit/async_grpo/data/test_arithmetic.py"),
    "carry_is_the_digit: carry = total // 10 --> carry = total % 10",
    ("async_grpo/rewards/base.py", "tests/unit/async_grpo/rewards/test_results.py"),
    "length_penalty_unbounded: excess = min(max(0, length --> excess = max(max(0, length",
    ("async_grpo/rewards/base.py", "tests/unit/async_grpo/rewards/test_results.py"),
    "reward_without_weight: function.weight * scores[function.name] --> scores[function.name]",
    "failed_verifier_ignored: if function.required and function --> if not function.required and function",
    ("async_grpo/rewards/verifiers/answers.py", "tests/unit/async_grpo/rewards/verifiers/test_verifiers.py"),
    "first_number_counts: if len(numbers) == 1 else None --> if numbers else None",
    ("async_grpo/utils/frames.py", "tests/unit/async_grpo/utils/test_frames.py"),
    "frame_length_unbounded: if length > max_bytes: --> if length < 0:",
    ("async_grpo/weights/node/fetch.py", "tests/integration/async_grpo/weights/test_weight_delta_plane.py"),
    "chunk_hash_not_compared: return hash_chunk(data) == int(self.served.hashes[index]) --> return True",
    ("async_grpo/weights/store.py", "tests/unit/async_grpo/weights/test_weight_store.py"),
    "held_slot_overwritten: return 1 - older if self._version_in(older) == keep else older --> return older",
    "slots_swapped: return 1 if self._is_complete(0) else 0 --> return 0 if self._is_complete(0) else 1",
    ("async_grpo/weights/delta.py", "tests/unit/async_grpo/weights/test_weight_delta.py"),
    "gap_of_255_in_one_byte: np.flatnonzero(distances >= _SKIP) --> np.flatnonzero(distances > _SKIP)",
    ("async_grpo/weights/zmq/chunk_server.py", "tests/unit/async_grpo/weights/test_weight_chunk_server.py"),
    "unsigned_request_served: elif not request.is_signed(served.key) or not --> elif not",
    ("async_grpo/weights/node/fetch.py", "tests/unit/async_grpo/weights/test_weight_fetch.py"),
    "credits_not_counted: free = self._credits - len(self._deadlines) --> free = self._credits",
    (
        "async_grpo/staleness.py",
        "tests/unit/async_grpo/test_staleness_bounds.py",
        "tests/unit/async_grpo/test_staleness.py",
    ),
    "age_bound_one_too_many: (total_uses - 1) // self.window --> total_uses // self.window",
    ("async_grpo/staleness.py", "tests/unit/async_grpo/test_staleness.py"),
    "window_one_step_short: (self.effective_staleness + 1) * --> max(1, self.effective_staleness) *",
    ("async_grpo/staleness.py", "tests/unit/async_grpo/test_staleness.py"),
    "batch_not_counted: - (uses + batch) >= --> - uses >=",
    ("async_grpo/wire/records.py", "tests/unit/async_grpo/wire/test_wire_records.py"),
    "versions_may_decrease: span.end <= span.start or span.version < version: --> span.end <= span.start:",
    "age_from_newest_token: return min(span.version for span --> return max(span.version for span",
    ("async_grpo/config/load.py", "tests/unit/async_grpo/config/test_config.py"),
    "base_wins_over_file: return _merge(merged, raw) --> return _merge(raw, merged)",
    ("async_grpo/config/rollout.py", "tests/unit/async_grpo/config/test_config.py"),
    "lease_shorter_than_wait: if lease_s < redis.timeout_s: --> if lease_s < 0:",
    ("async_grpo/evaluation/estimators.py", "tests/unit/async_grpo/evaluation/test_evaluation.py"),
    "pass_at_k_of_the_right_ones: math.comb(made - right, k) --> math.comb(right, k)",
    ("async_grpo/evaluation/estimators.py", "tests/unit/async_grpo/evaluation/test_evaluation.py"),
    "interval_one_sided: edges = ((1.0 - LEVEL) / 2, (1.0 + LEVEL) / 2) --> edges = (1.0 - LEVEL, LEVEL)",
    ("async_grpo/utils/text.py", "tests/unit/async_grpo/app/report/test_run_report.py"),
    'fence_can_be_closed: fence = "`" * max(3, longest + 1) --> fence = "`" * 3',
    ("async_grpo/telemetry/jsonl.py", "tests/unit/async_grpo/telemetry/test_telemetry_files.py"),
    'half_a_line_is_read: written[: written.rfind(b"\\n") + 1] --> written',
    ("async_grpo/app/report/summary.py", "tests/unit/async_grpo/app/report/test_run_report.py"),
    "books_without_active: == sum(released.values()) + active --> == sum(released.values())",
    ("async_grpo/app/launch/supervisor.py", "tests/unit/async_grpo/app/launch/test_restart_policy.py"),
    "one_restart_too_many: if restarts < limit --> if restarts <= limit",
    ("async_grpo/app/launch/role_specs.py", "tests/unit/async_grpo/app/launch/test_devices.py"),
    'device_for_two_roles: first = 0 if config.launch.share_devices != "off" else ranks --> first = 0',
    ("async_grpo/utils/files.py", "tests/unit/async_grpo/utils/test_device_turn.py"),
    "engine_wakes_in_a_step: while self._is_wanted() or not try_lock(self._use, shared=True) --> while False",
    ("rollout_server/weight_watcher.py", "tests/unit/rollout_server/test_weight_watcher.py"),
    "weights_into_a_sleeping_engine: self._engine_lock, self._awake_lock, --> self._engine_lock,",
    ("trainer/model/optimizer_offload.py", "tests/unit/trainer/model/test_state_offload.py"),
    'whole_optimizer_fetched: "params": [parameter]} --> "params": group["params"]}',
    ("trainer/platform/accelerator.py", "tests/contract/test_platforms.py"),
    "reserved_memory_given_away: config.device_memory_share - reserved --> config.device_memory_share",
    ("async_grpo/app/launch/run_folder.py", "tests/unit/async_grpo/app/launch/test_run_folder.py"),
    'other_optimizer_resumed: "trainer.optimizer.offload" --> "trainer.optimizer"',
    ("async_grpo/lab/sweep/recommend.py", "tests/unit/async_grpo/lab/sweep/test_sweep_recommend.py"),
    "margin_wrong_sign: if best.learning - candidate.learning <= --> if candidate.learning - best.learning <=",
    (
        "async_grpo/lab/sweep/settings.py",
        "tests/unit/async_grpo/lab/sweep/test_sweep_recommend.py",
        "tests/unit/async_grpo/lab/sweep/test_sweep_report.py",
    ),
    "error_of_one_seed: statistics.stdev(values) / math.sqrt(len(values)) --> statistics.stdev(values)",
    ("async_grpo/lab/sweep/runner.py", "tests/unit/async_grpo/lab/sweep/test_sweep_runner.py"),
    "devices_not_given_back: [*self.free, *self._used.pop(run, [])] --> [*self.free]",
    (
        "buffer/state.py",
        *(f"tests/contract/test_buffer_{part}.py" for part in ("recovery", "leases", "admission")),
    ),
    "old_epoch_not_fenced: if epoch != self.epoch: --> if epoch > self.epoch:",
    "old_attempt_holds: deadline_s is not None and active.attempt == ticket.attempt --> deadline_s is not None",
    "uses_one_too_many: .uses >= self.policy.max_uses: --> .uses > self.policy.max_uses:",
    ("buffer/selection.py", "tests/unit/buffer/test_selection.py"),
    "overtaken_by_one_too_many: seq >= first_in_flight + selector_window --> seq > first_in_flight + selector_window",
    ("buffer/redis/lua/parts/state.lua", "tests/contract/test_buffer_recovery.py"),
    "redis_old_epoch_not_fenced: tonumber(epoch) ~= meta_number('epoch') --> tonumber(epoch) > meta_number('epoch')",
    ("buffer/redis/lua/take_batch.lua", "tests/contract/test_buffer_policies.py"),
    "redis_overtaken_by_one_too_many: >= first_in_flight + window --> > first_in_flight + window",
    ("buffer/redis/lua/admit_groups.lua", "tests/contract/test_buffer_admission.py"),
    "redis_window_one_group_too_large: run.groups_per_step - active --> run.groups_per_step + 1 - active",
    ("buffer/redis/scripts.py", "tests/unit/test_goldens.py"),
    'runs_without_hash_tag: f"agrpo:{{{run}}}:" --> f"agrpo:{run}:"',
    ("buffer/redis/connection.py", "tests/unit/buffer/test_redis_packing.py"),
    'small_parts_sent_twice: small = [b"\\r\\n"] --> small = [*small, b"\\r\\n"]',
    ("rollout_server/dispatch/concurrency.py", "tests/unit/rollout_server/dispatch/test_slots.py"),
    "slots_not_released: self.reserved -= samples --> self.reserved -= min(1, samples)",
    ("rollout_server/weight_watcher.py", "tests/unit/rollout_server/test_weight_watcher.py"),
    "versions_go_back: if newest.version >= self._engine.version: --> if newest.version >= 0:",
    ("rollout_server/dispatch/group_rollout.py", "tests/unit/rollout_server/dispatch/test_dispatcher.py"),
    "resumed_on_older_weights: return max([self.ticket.version, *versions]) --> return self.ticket.version",
    ("rollout_server/engines/base.py", "tests/unit/rollout_server/workflows/test_session.py"),
    "spans_not_moved: span.start + offset, span.end + offset --> span.start, span.end + offset",
    ("rollout_server/http/context.py", "tests/unit/rollout_server/http/test_http_routes.py"),
    'any_key_admits: return same and scheme.lower() == "bearer" --> return scheme.lower() == "bearer"',
    ("rollout_server/http/jobs.py", "tests/unit/rollout_server/http/test_http_routes.py"),
    "completions_not_bounded: if self.running + len(requests) > self._limit: --> if self.running > self._limit:",
    ("rollout_server/http/detokenizer.py", "tests/unit/rollout_server/http/test_http_text.py"),
    "half_a_stop_text_sent: keep = max((_overlap(text, stop) for stop in self._stops), default=0) --> keep = 0",
    ("rollout_server/http/prompts.py", "tests/unit/rollout_server/http/test_http_routes.py"),
    "token_outside_vocabulary: >= self._vocabulary: --> > self._vocabulary:",
    ("trainer/batch/sequences.py", "tests/unit/trainer/batch/test_sequences.py"),
    "predicted_one_position_late: start + sequence.prompt_tokens - 1 + --> start + sequence.prompt_tokens +",
    "mask_one_version_too_many: (versions_C >= mask_below) --> (versions_C > mask_below)",
    ("trainer/batch/packing.py", "tests/unit/trainer/batch/test_batching.py"),
    "budget_not_charged: room[tightest] -= lengths[index] --> room[tightest] -= 0",
    (
        "trainer/step/step.py",
        "tests/integration/trainer/test_trainer_updates.py::test_two_passes_of_two_updates_equal_hugging_face_and_torch_adamw",
    ),
    "weights_of_the_whole_batch: yield reweight_sequences( --> yield mini_batch or reweight_sequences(",
    ("trainer/checkpoint/manifest.py", "tests/unit/trainer/checkpoint/test_manifest.py"),
    "file_hash_not_compared: name) != manifest.files[name] --> name).bytes != manifest.files[name].bytes",
    ("trainer/checkpoint/folder.py", "tests/unit/trainer/checkpoint/test_retention.py"),
    "one_checkpoint_too_few: len(below) - (keep - 1) --> len(below) - keep",
    (
        "trainer/checkpoint/folder.py",
        "tests/integration/trainer/test_trainer_checkpoints.py::test_a_trainer_that_was_thought_dead_does_not_replace_the_newer_ones_checkpoint",
    ),
    "old_trainer_not_fenced: if newest > epoch: --> if newest > epoch + 1_000_000:",
    ("trainer/step/skipped_steps.py", "tests/unit/trainer/step/test_skips.py"),
    "skips_never_forgiven: self.consecutive = 0 --> self.consecutive += 0",
    (
        "trainer/ranks/rendezvous.py",
        "tests/integration/trainer/test_trainer_meeting.py",
    ),
    "rank_beyond_nodes_taken_in: 0 < other.rank < own.nodes --> 0 < other.rank <= own.nodes",
    ("trainer/ranks/agreement.py", "tests/integration/trainer/test_agreement.py"),
    "another_first_policy_taken_in: if own.model != rank_0_claim.model: --> if not own.model:",
    "objection_of_one_rank_alone_heard: rank in range(1, self.ranks)) --> rank in range(1, 2))",
    ("trainer/model/shards.py", "tests/unit/trainer/model/test_shards.py"),
    "ranks_near_rank_0_copy_no_more: local_replicas.get(kind) or all_replicas[kind] --> all_replicas[kind]",
    ("trainer/shard_stream.py", "tests/integration/trainer/test_shard_stream.py"),
    "pieces_share_one_buffer: self._buffers[number % 2] --> self._buffers[0]",
    ("trainer/ranks/local_ranks.py", "tests/unit/trainer/test_node_settings.py"),
    "ranks_of_nodes_overlap: node_rank * count + local --> node_rank + local",
    ("trainer/ranks/peers.py", "tests/integration/trainer/test_trainer_meeting.py"),
    'bad_end_is_a_good_one: case Ended(reason=""): --> case Ended(config_fault=False):',
]
"""Behind a tuple of a file and its tests: the faults of this file, each `name: old text --> new text`."""


def _read(planted: Iterable[str | tuple[str, ...]]) -> Iterator[Fault]:
    file = ""
    tests = tuple[str, ...]()
    for entry in planted:
        if isinstance(entry, tuple):
            file, *listed = entry
            tests = tuple(listed)
        else:
            name, _, texts = entry.partition(": ")
            old, _, new = texts.partition(" --> ")
            yield Fault(name, file, old, new, tests)


FAULTS = list(_read(PLANTED))


def main(names: Sequence[str]) -> int:
    """The exit code."""
    if unknown := set(names) - {fault.name for fault in FAULTS}:
        print(f"no such fault: {', '.join(sorted(unknown))}")
        return 1
    chosen = [fault for fault in FAULTS if not names or fault.name in names]
    with tempfile.TemporaryDirectory(prefix="planted-") as folder:
        copy = Path(folder)
        _copy_tracked_files(copy)
        broken = _broken_without_faults(copy, chosen)
        outcomes = {fault.name: _outcome(fault, copy, broken.get(fault.tests, "")) for fault in chosen}
    missed = [name for name, caught in outcomes.items() if not caught]
    print(f"{len(chosen) - len(missed)} of {len(chosen)} caught" + (f"; not {', '.join(missed)}" if missed else ""))
    return 1 if missed else 0


def _broken_without_faults(copy: Path, chosen: Sequence[Fault]) -> dict[tuple[str, ...], str]:
    """The lists of tests that do not pass as they are, with what pytest printed."""
    lists = dict.fromkeys(fault.tests for fault in chosen)
    if _run_tests(copy, dict.fromkeys(test for tests in lists for test in tests))[0] == PASSED:
        return {}
    runs = {tests: _run_tests(copy, tests) for tests in lists}
    return {tests: said for tests, (code, said) in runs.items() if code != PASSED}


def _outcome(fault: Fault, copy: Path, broken: str) -> bool:
    """Plant the fault and say what its tests make of it; True if they caught it."""
    path = copy / fault.file
    started_s = time.monotonic()
    right = path.read_text() if path.is_file() else ""
    caught = False
    said = ""
    if (count := right.count(fault.old)) != 1:
        said = f"{fault.old!r} stands {count} times in {fault.file}, not once"
    elif broken:
        said = f"its tests do not pass without it:\n{broken}"
    else:
        path.write_text(right.replace(fault.old, fault.new))
        code, printed = _run_tests(copy, fault.tests)
        path.write_text(right)
        found = re.search(r"^(?:FAILED|ERROR) (\S+::\S+)", printed, re.MULTILINE)
        caught = code == FAILED and found is not None
        said = f"caught by {found[1]}" if caught and found else f"the tests could not be run:\n{printed}"
        said = "SURVIVED" if code == PASSED else said
    print(f"{fault.name}: {said} ({time.monotonic() - started_s:.0f} s)", flush=True)
    return caught


def _copy_tracked_files(target: Path) -> None:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in filter(None, listed.split("\0")):
        source = ROOT / name
        if not source.is_file() and not source.is_symlink():
            continue  # deleted, and the deletion is not committed yet
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        # async_grpo/configs is a link to a folder: without it the shipped configurations would be missing in the copy.
        shutil.copy2(source, target / name, follow_symlinks=False)


def _run_tests(copy: Path, tests: Iterable[str]) -> tuple[int, str]:
    """pytest's exit code, and what it printed."""
    environment = {**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    argv = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", f"--timeout={TEST_TIMEOUT_S}"]
    try:
        done = subprocess.run(
            [*argv, *tests], cwd=copy, env=environment, capture_output=True, text=True, timeout=RUN_TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        return -1, f"not done after {RUN_TIMEOUT_S} s"
    return done.returncode, done.stdout[-4000:] + done.stderr[-4000:]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
