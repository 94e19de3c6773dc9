"""Matrix products by oneDNN: what they are, and where they take the place of PyTorch's."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from trainer.platform import cpu_patches

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="PyTorch was built without oneDNN")

IN_PLACE = """
import pathlib, sys, torch
from trainer.platform import cpu_patches as products

seen = []
multiply = products.onednn_product
products.onednn_product = lambda left, right: seen.append(left.dtype) or multiply(left, right)
products._CPUINFO = pathlib.Path(sys.argv[1])
torch.backends.cpu.get_cpu_capability = lambda: "AVX512"
assert products.use_onednn_products() and products.use_onednn_products()

torch.manual_seed(1)
x, weight = torch.randn(3, 50, 64, requires_grad=True), torch.randn(32, 64, requires_grad=True)
torch.matmul(x, weight.t()).square().sum().backward()
assert seen == [torch.float32] * 3, seen
doubles = [one.detach().double().requires_grad_() for one in (x, weight)]
torch.matmul(doubles[0], doubles[1].t()).square().sum().backward()
for one, exact in zip((x, weight), doubles, strict=True):
    torch.testing.assert_close(one.grad, exact.grad.float(), rtol=1e-5, atol=1e-4)
"""


@pytest.mark.parametrize(("rows", "inner", "columns"), [(1, 1, 1), (7, 64, 3), (300, 192, 576)])
@pytest.mark.parametrize("turned", [(False, False), (True, False), (False, True), (True, True)])
def test_a_product_is_exact_to_float32_whatever_the_strides(
    rows: int, inner: int, columns: int, turned: tuple[bool, bool]
) -> None:
    torch.manual_seed(rows)
    left = torch.randn(inner, rows).t() if turned[0] else torch.randn(rows, inner)
    right = torch.randn(columns, inner).t() if turned[1] else torch.randn(inner, columns)
    exact = left.double() @ right.double()
    torch.testing.assert_close(
        cpu_patches.onednn_product(left, right).double(), exact, rtol=1e-5, atol=1e-5 * inner**0.5
    )


@pytest.mark.parametrize("shape", [(2, 0, 3), (0, 4, 3), (2, 4, 0)])
def test_a_product_of_nothing_is_nothing(shape: tuple[int, int, int]) -> None:
    result = cpu_patches.onednn_product(torch.ones(shape[0], shape[1]), torch.ones(shape[1], shape[2]))
    assert torch.equal(result, torch.zeros(shape[0], shape[2]))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int64])
def test_other_types_are_multiplied_as_ever(dtype: torch.dtype) -> None:
    left, right = torch.arange(6).reshape(2, 3).to(dtype), torch.arange(12).reshape(3, 4).to(dtype)
    assert torch.equal(cpu_patches.onednn_product(left, right), left @ right)


@pytest.mark.parametrize("maker", ["GenuineIntel", None])
def test_processors_of_other_makers_are_left_alone(
    maker: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_patches, "_CPUINFO", tmp_path / "cpuinfo")
    monkeypatch.setattr(cpu_patches, "_override_mm", lambda: pytest.fail("overridden"))
    if maker:
        (tmp_path / "cpuinfo").write_text(f"vendor_id : {maker}\n")
    assert not cpu_patches.use_onednn_products()


def test_the_override_serves_forward_and_backward_of_a_linear_layer(tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text("vendor_id : AuthenticAMD\n")
    argv = [sys.executable, "-c", IN_PLACE, str(tmp_path / "cpuinfo")]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "Overriding" not in done.stderr
