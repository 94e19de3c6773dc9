"""Ranks agree on what they train in a real store, as threads of this process: what differs is told to all of them."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from torch.distributed import TCPStore

from async_grpo.errors import ConfigError, NodeLost, WaitTimeout
from trainer.ranks import agreement
from trainer.ranks.agreement import Agreement, Claim
from trainer.ranks.store import OPENED, join_store

HERE = "127.0.0.2"
PATIENCE_S = 60.0

Agree = Callable[..., list[str]]


def claim(folder: Path, lr: float = 1.0, model: str = "the same") -> Claim:
    config = yaml.safe_dump({"seed": 1, "trainer": {"optimizer": {"lr": lr}}})
    return Claim(config=config, model=model, folder=str(folder / "checkpoints"), nonce=f"{time.time_ns():x}")


@pytest.fixture
def agree() -> Agree:
    """How each rank with a claim ended: "" is well."""

    def reach(*claims: Claim, missing: int = 0, timeout_s: float = PATIENCE_S) -> list[str]:
        patience = timedelta(seconds=PATIENCE_S)
        opened = TCPStore(HERE, 0, is_master=True, wait_for_workers=False, timeout=patience)

        def be(rank: int) -> None:
            store = TCPStore(HERE, opened.port, is_master=False, timeout=patience)
            Agreement(store, rank, len(claims) + missing, timeout_s).reach_agreement(claims[rank])

        with ThreadPoolExecutor() as pool:
            return [said(running) for running in [pool.submit(be, rank) for rank in range(len(claims))]]

    return reach


def said(running: Future[Any]) -> str:
    error = running.exception(PATIENCE_S)
    assert error is None or isinstance(error, ConfigError | WaitTimeout)
    return "" if error is None else f"{type(error).__name__}: {error}"


def test_ranks_that_agree_leave_no_file_behind(tmp_path: Path, agree: Agree) -> None:
    assert agree(*[claim(tmp_path)] * 3) == [""] * 3
    assert list((tmp_path / "checkpoints").iterdir()) == []


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"lr": 2.0}, "rank 2 has other values than rank 0 for trainer.optimizer.lr, but"),
        ({"model": "another"}, "rank 2 loads other initial weights than rank 0"),
    ],
)
def test_what_one_rank_would_do_otherwise_is_told_to_all(
    tmp_path: Path, agree: Agree, changes: dict[str, Any], reason: str
) -> None:
    found = agree(claim(tmp_path), claim(tmp_path), claim(tmp_path, **changes))
    assert len(set(found)) == 1
    assert found[0].startswith(f"ConfigError: {reason}")


def test_ranks_that_do_not_share_the_folder_of_checkpoints_are_told_which_it_is(
    tmp_path: Path, agree: Agree, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agreement, "VISIBLE_WITHIN_S", 0.5)
    (tmp_path / "elsewhere" / "checkpoints").mkdir(parents=True)
    (tmp_path / "elsewhere" / "checkpoints" / ".rank-0").write_text("left by a rank 0 that was killed")
    reason, same = agree(claim(tmp_path), claim(tmp_path / "elsewhere"))
    assert reason == same
    assert f"{tmp_path}/checkpoints on rank 0 and" in reason
    assert f"{tmp_path}/elsewhere/checkpoints" in reason
    assert "Set runs_dir to a folder that all nodes share" in reason


@pytest.mark.parametrize("rank", [0, 1])
def test_a_folder_that_cannot_be_written_to_is_named(
    tmp_path: Path, agree: Agree, monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    monkeypatch.setattr(agreement, "VISIBLE_WITHIN_S", 0.5)
    claims = [claim(tmp_path), claim(tmp_path)]
    (tmp_path / "file").touch()
    claims[rank] = claim(tmp_path / "file")
    reason, same = agree(*claims)
    assert reason == same
    assert f"rank {rank} cannot write to {tmp_path}/file/checkpoints" in reason


def test_a_rank_that_never_comes_is_named(tmp_path: Path, agree: Agree) -> None:
    found, _ = agree(claim(tmp_path), claim(tmp_path), missing=2, timeout_s=1.0)
    assert found.startswith("WaitTimeout: waited 1 s for rank 2, 3 of the trainer")
    assert list((tmp_path / "checkpoints").iterdir()) == []


def test_a_claim_is_no_other_record() -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgspec.msgpack.encode({"type": "task"}), type=Claim)


@pytest.fixture
def placed_at(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Makes this process the rank, of two that a launcher has placed."""
    with socket.create_server((HERE, 0)) as probe:
        port = probe.getsockname()[1]
    monkeypatch.delenv(OPENED, raising=False)

    def be(rank: int) -> None:
        for name, value in (("RANK", rank), ("WORLD_SIZE", 2), ("MASTER_ADDR", HERE), ("MASTER_PORT", port)):
            monkeypatch.setenv(name, str(value))

    return be


def test_rank_0_opens_the_store_at_its_address_alone_where_a_launcher_has_placed_the_ranks(
    placed_at: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    placed_at(0)
    first = join_store(PATIENCE_S)
    with pytest.raises(ConfigError, match=f"listen at {HERE}"):
        join_store(PATIENCE_S)
    placed_at(1)
    join_store(PATIENCE_S).set("rank 1", "is here")
    assert first.get("rank 1") == b"is here"
    with pytest.raises(NodeLost, match="rank 1"):
        join_store(PATIENCE_S)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    with pytest.raises(WaitTimeout, match=r"store .*127\.0\.0\.1"):
        join_store(1.0)
