"""What the trainer needs of torch_npu, Transformer Engine and Megatron-core, held against their own sources."""

from __future__ import annotations

import ast
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from async_grpo.config.trainer import TrainerConfig
from tests.support import npu_operators
from tests.support.mindspeed import unpacked_source
from tests.support.trainer_programs.launching import Run, adamw, run_all
from tests.support.trainer_programs.models import make_model
from tests.support.upstream import ROOT, Unpacked, fail_with_findings, find_release, run_python
from trainer.platform.npu import NpuPlatform

pytestmark = pytest.mark.slow
OPERATORS = "torch_npu/csrc/aten/npu_native_functions_by_codegen.yaml"
WRAPPERS = "megatron/core/extensions/transformer_engine.py"
READ_BY_CANN = {"HCCL_SOCKET_IFNAME"}
"""Variables of the collectives' library, which is part of no Python package."""


@pytest.mark.parametrize("name", npu_operators.SCHEMAS)
def test_torch_npu_registers_the_operators_that_the_trainer_calls(name: str) -> None:
    release = find_release("torch-npu")
    schemas = re.findall(rf"^  func: ({name}\(.*)$", release.read(OPERATORS), re.MULTILINE)
    expected = [_arguments(npu_operators.SCHEMAS[name])]
    found = [_arguments(schema) for schema in schemas]
    wanted = npu_operators.SCHEMAS[name]
    fail_with_findings([release], [] if found == expected else [f"{name}: {schemas or 'not registered'}, not {wanted}"])


def _arguments(schema: str) -> list[Any]:
    """Names, types and defaults, in their order, and the types of the results."""
    parsed = torch._C.parse_schema(schema)
    arguments = [
        (each.name, str(each.type), each.default_value, each.kwarg_only)
        for each in parsed.arguments
    ]  # fmt: skip
    return [arguments, [str(each.type) for each in parsed.returns]]


def test_every_operator_of_torch_npu_that_the_trainer_names_has_a_schema_here() -> None:
    sources = (file.read_text(encoding="utf-8") for file in (ROOT / "trainer").rglob("*.py"))
    named = {name for source in sources for name in re.findall(r"\.(npu_[a-z_]+)\b(?! import)", source)}
    assert named
    assert named <= npu_operators.SCHEMAS.keys()


def test_the_environment_of_an_npu_rank_is_read_by_torch_npu_or_mindspeed(tmp_path: Path) -> None:
    release = find_release("torch-npu")
    mindspeed = Unpacked("MindSpeed", "", unpacked_source(tmp_path), pinned=True)
    platform = NpuPlatform()
    ours = {*platform.rank_environment(TrainerConfig()), *platform.network_variables, platform.visible_variable}
    fail_with_findings(
        [release, mindspeed],
        [f"nothing reads {each}" for each in sorted(ours - READ_BY_CANN - release.words() - mindspeed.words())],
    )


def test_torch_npu_has_the_streams_that_the_trainer_copies_on() -> None:
    release = find_release("torch-npu")
    tree = ast.parse(release.read("torch_npu/npu/streams.py"))
    methods = {
        node.name: {each.name for each in node.body if isinstance(each, ast.FunctionDef)}
        for node in tree.body
        if isinstance(node, ast.ClassDef)
    }
    wanted = {
        "Stream": {"record_event", "wait_event", "wait_stream", "synchronize"},
        "SyncLaunchStream": {"record_event"},
        "Event": {"query"},
    }
    fail_with_findings(
        [release],
        [f"{name} has no {each}" for name in wanted for each in sorted(wanted[name] - methods.get(name, set()))],
    )


def _function(release: Unpacked, file: str, name: str) -> ast.FunctionDef:
    """A function, or the method CLASS.NAME, of a file."""
    node: Any = ast.parse(release.read(file))
    for part in name.split("."):
        found = [each for each in ast.walk(node) if getattr(each, "name", None) == part]
        if not found:
            fail_with_findings([release], [f"{file} has no {name}"])
        node = found[0]
    assert isinstance(node, ast.FunctionDef)
    return node


def _parameters(release: Unpacked, file: str, name: str) -> set[str]:
    arguments = _function(release, file, name).args
    return {each.arg for each in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)}


def _keywords(node: ast.AST, called: str) -> set[str]:
    """Names of the keyword arguments in the calls of `called` within a function."""
    calls = [each for each in ast.walk(node) if isinstance(each, ast.Call) and ast.unparse(each.func) == called]
    return {keyword.arg for call in calls for keyword in call.keywords if keyword.arg}


TE = "transformer_engine/pytorch"
ATTENTION = f"{TE}/attention/dot_product_attention/dot_product_attention.py"
LAYERS = {
    "TELinear.__init__": ("super().__init__", f"{TE}/module/linear.py", "Linear.__init__"),
    "TEDotProductAttention.__init__": ("super().__init__", ATTENTION, "DotProductAttention.__init__"),
    "TENorm.__new__": ("te.pytorch.RMSNorm", f"{TE}/module/rmsnorm.py", "RMSNorm.__init__"),
}
"""Megatron's wrapper: what it calls of Transformer Engine, and where that is."""
PASSED_ON = {
    "TENorm.__new__": {"normalized_shape", "zero_centered_gamma"},  # RMSNorm hands them to its operator
}


@pytest.mark.parametrize("wrapper", LAYERS)
def test_transformer_engine_takes_what_megatrons_layers_give_it(wrapper: str) -> None:
    megatron = find_release("megatron-core")
    engine = find_release("transformer-engine")
    called, file, name = LAYERS[wrapper]
    given = _keywords(_function(megatron, WRAPPERS, wrapper), called)
    taken = _parameters(engine, file, name) | PASSED_ON.get(wrapper, set())
    absent = [] if given else [f"{wrapper} no longer calls {called} by keywords: read it again"]
    fail_with_findings([engine, megatron], absent + [f"{name} does not take {each}" for each in sorted(given - taken)])


def test_transformer_engines_attention_takes_the_packed_sequences_of_megatron() -> None:
    megatron = find_release("megatron-core")
    engine = find_release("transformer-engine")
    packed = ast.parse(megatron.read("megatron/core/packed_seq_params.py"))
    fields = {node.target.id for node in ast.walk(packed) if isinstance(node, ast.AnnAssign)}  # type: ignore[union-attr]
    wanted = {"qkv_format", "cu_seqlens_q", "cu_seqlens_kv", "max_seqlen_q", "max_seqlen_kv"}
    taken = _parameters(engine, ATTENTION, "DotProductAttention.forward")
    absent = [f"PackedSeqParams has no {each}" for each in sorted(wanted - fields)]
    fail_with_findings(
        [engine, megatron],
        absent
        + [f"DotProductAttention.forward does not take {each}" for each in sorted({*wanted, "attn_mask_type"} - taken)],
    )


def test_transformer_engine_rotates_packed_sequences() -> None:
    engine = find_release("transformer-engine")
    taken = _parameters(engine, f"{TE}/attention/rope.py", "apply_rotary_pos_emb")
    wanted = {"t", "freqs", "tensor_format", "interleaved", "fused", "cu_seqlens", "cp_size", "cp_rank"}
    fail_with_findings([engine], [f"apply_rotary_pos_emb does not take {each}" for each in sorted(wanted - taken)])


def test_megatron_has_every_private_name_that_the_trainer_uses() -> None:
    release = find_release("megatron-core")
    program = (
        "import json\n"
        "from async_grpo.utils.private_names import PRIVATE_NAMES, explain_missing\n"
        "users = [user for user, each in PRIVATE_NAMES.items() if each.package == 'megatron-core']\n"
        "names = [name for user in users for name in PRIVATE_NAMES[user].names]\n"
        "print(json.dumps([f'{name}: {why}' for name in names if (why := explain_missing(name))]))\n"
    )
    fail_with_findings([release], run_python(program, release))


def test_the_trainer_steps_with_this_megatron(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pinned release is the installed one, with which all other tests run."""
    release = find_release("megatron-core")
    if release.pinned:
        pytest.skip("the pinned release is installed, and all tests of the trainer run with it")
    (tmp_path / "path").mkdir()
    (tmp_path / "path" / "megatron").symlink_to(release.path / "megatron")  # without its version, which is refused
    outcomes = {}
    for name in ("pinned", "other"):
        if name == "other":
            monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'path'}{os.pathsep}{ROOT}")
        folder = tmp_path / name
        folder.mkdir()
        run = Run(make_model(folder, "qwen2"), adamw(1e-3), {"versions": [0, 1]})
        try:
            outcomes[name] = run_all({folder: {name: run}}, ranks=1)[folder][name]
        except AssertionError as error:
            fail_with_findings(
                [release], [line for line in str(error).splitlines() if "Error" in line][-3:] or [str(error)[-400:]]
            )
    pinned = outcomes["pinned"]
    other = outcomes["other"]
    worst = max(float((other.trained[key] - tensor).abs().max()) for key, tensor in pinned.trained.items())
    fail_with_findings([release], [] if worst < 1e-6 else [f"weights differ by {worst:.1e} after two steps"])
