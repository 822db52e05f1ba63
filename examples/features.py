"""Two features: an activation of one's own in the feed-forward layers, and a wrapper that counts calls.

In a run:

    banyan train ... banyan.feature.modules=[examples/features.py] banyan.feature.args.swiglu_beta=1.0

By itself, on a model directory, this file scores a few samples with the features and without them:

    python examples/features.py --model DIR
"""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path

import torch

from banyan import feature

CALLS: Counter[str] = Counter()  # of the ops that are counted


class SwishGlu(feature.Feature):
    """gate * sigmoid(beta * gate) * up: SwiGLU is beta = 1. Its backward is taken by autograd."""

    def register_args(self, args):
        args.add("swiglu_beta", float, 1.0, "slope of the sigmoid")

    def validate(self, args):
        if args.swiglu_beta <= 0:
            raise feature.UserError(f"swiglu_beta: wanted > 0, got {args.swiglu_beta}")

    def register_patches(self, slots, args):
        beta = args.swiglu_beta

        def forward(gate_up):
            gate, up = gate_up.float().chunk(2, dim=-1)  # [T, F] each
            return (gate * torch.sigmoid(beta * gate) * up).to(gate_up.dtype)

        slots.replace("swiglu", forward)


class CountNorms(feature.Feature):
    """Counts the calls of rms_norm, forward and backward, and changes nothing."""

    level = 1

    def register_patches(self, slots, args):
        def counted(inner):
            def forward(*arguments):
                CALLS["forward"] += 1
                return inner.forward(*arguments)

            def backward(*arguments):
                CALLS["backward"] += 1
                return inner.backward(*arguments)

            return inner.with_functions(forward=forward, backward=backward)

        slots.wrap("rms_norm", counted)


feature.register(SwishGlu)
feature.register(CountNorms)


def compare(model_dir: Path, samples: list[list[int]], dtype: str = "fp32") -> dict[str, float]:
    """Largest differences of log-probabilities: under the features, and after them."""
    from banyan import extension

    core = extension.load()
    model = core.Model.load(str(model_dir), dtype)

    def score() -> torch.Tensor:
        return torch.cat(core.score(model, samples)["logprobs"])

    before = score()
    CALLS.clear()
    with feature.applied(SwishGlu, CountNorms):
        inside = score()
    after = score()
    return {
        "under the features": (inside - before).abs().max().item(),
        "after them": (after - before).abs().max().item(),
        "norms counted": CALLS["forward"],
    }


def main(argv: list[str] | None = None) -> dict[str, float]:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", type=Path, required=True, help="a model directory")
    args = parser.parse_args(argv)
    trunk = list(range(5, 25))
    figures = compare(args.model, [[*trunk, 30 + i, 31 + i] for i in range(4)])
    for name, figure in figures.items():
        print(f"{name}: {figure:g}")
    return figures


if __name__ == "__main__":
    main()
