"""Where versions may lie, and what is said of a place that cannot be used."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from async_grpo.config.weights import WeightsConfig
from async_grpo.errors import ConfigError
from async_grpo.weights.folder.objects import FolderObjects, _without_secrets, check_location


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"transport": "shared_filesystem"}, "needs an absolute path that every machine mounts, got None"),
        ({"transport": "shared_filesystem", "location": "relative"}, "got relative. Set weights.location"),
        ({"transport": "object_store", "location": "/mnt/weights"}, "needs a URL such as s3://BUCKET/PREFIX"),
        ({"transport": "object_store", "location": "s3://key:secret@bucket/runs"}, "needs a URL such as s3://BUCKET"),
        ({"location": "/mnt/weights"}, "is not used by transport zmq"),
        (
            {"transport": "shared_filesystem", "location": "/mnt/weights", "encrypt": "all"},
            "Set weights.encrypt to off",
        ),
    ],
)
def test_a_transport_names_the_location_it_needs(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        WeightsConfig(**keys)


def in_folder(folder: Path) -> WeightsConfig:
    return WeightsConfig(transport="shared_filesystem", location=str(folder))


def test_a_folder_is_tried_and_left_as_it_was(tmp_path: Path) -> None:
    assert "can be written to" in check_location(in_folder(tmp_path), "run")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_not_mounted_is_not_made(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"is not usable: .*No such file.*Mount a folder there"):
        check_location(in_folder(tmp_path / "absent"), "run")
    assert list(tmp_path.iterdir()) == []


def test_an_object_is_whole_or_not_there(tmp_path: Path) -> None:
    objects = FolderObjects(tmp_path)

    def breaking() -> Any:
        yield b"half"
        raise OSError("no space")

    with pytest.raises(OSError, match="no space"):
        objects.write("run/a", breaking())
    assert objects.list_names("run") == []
    objects.write("run/a", [b"01", memoryview(b"2345")])
    assert (objects.list_names("run"), objects.read("run/a", 1, 3), objects.read("run/a", 4, 9)) == (
        ["run/a"],
        b"12",
        b"45",
    )
    objects.remove(["run/a", "run/absent"])
    assert list(tmp_path.iterdir()) == []


def test_errors_of_a_store_are_shown_without_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s3cr3t")
    shown = _without_secrets(ValueError("refused s3cr3t of a request\nwith more"))
    assert shown == "refused <AWS_SECRET_ACCESS_KEY> of a request"
