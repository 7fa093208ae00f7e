"""Log-probabilities of the trained tokens by a model's own definition in transformers, for families without `blocks`.

Owns the forward pass beside the fast one. Invariants: what is computed is the definition's own forward on the padded rows,
and autograd's gradient of it; rows are padded on the right and the definition is causal (`check_causal`), so padding needs no
mask. Logits exist for the columns of the rectangle in which any row predicts a trained token, and are kept for the backward
pass: the price of knowing nothing of the model's head.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from transformers import PreTrainedModel

from rollart.core.errors import TrainerError
from rollart.runtime.compiled import Native
from rollart.runtime.trainer.kernels import Kernels
from rollart.runtime.trainer.rows import Rows

CAUSAL_GAP = 1e-4
"""Largest difference of an earlier position's logit, in shares of the largest, that a later token may make: rounding."""


def no_kernels(beyond: str) -> Native[Kernels]:
    """`beyond`: what of the model the trainer's own layers do not compute."""
    return Native(None, f"the model goes through its definition in transformers ({beyond})")


def logprobs(
    model: PreTrainedModel, rows: Rows, temperature: float, with_entropy: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """(N,) of `rows.targets` at the sampling temperature, with gradient; and the summed entropy, without."""
    columns, column = torch.unique(rows.positions[rows.valid], return_inverse=True)
    keep: dict[str, Any] = {}
    if "logits_to_keep" in inspect.signature(model.forward).parameters:
        # at least one: an empty index is "all" to some models
        keep["logits_to_keep"] = columns if len(columns) else 1
    places = torch.arange(rows.ids.shape[1], device=rows.ids.device).expand_as(rows.ids)
    logits = model(input_ids=rows.ids, position_ids=places, use_cache=False, **keep).logits
    trained = logits[rows.valid.nonzero()[:, 0], column if keep else rows.positions[rows.valid]] / temperature
    table = trained.log_softmax(-1)
    found = table[torch.arange(len(table)), rows.targets]  # no view: sharded training hooks into what a pass returns
    entropy = torch.zeros((), dtype=torch.float64)
    if with_entropy:
        with torch.no_grad():
            entropy = -(table.exp() * table).sum(1).sum(dtype=torch.float64)
    return found, entropy


@torch.no_grad()
def check_causal(model: PreTrainedModel) -> None:
    """Raise TrainerError for a model that cannot be called as `logprobs` does, or in which a token looks at later ones."""
    kind = model.config.model_type
    one = torch.zeros(1, 3, dtype=torch.int64)
    other = one.clone()
    other[0, -1] = model.config.vocab_size - 1
    places = torch.arange(3)[None]
    try:
        logits, moved = (
            model(input_ids=ids, position_ids=places, use_cache=False).logits[:, :-1] for ids in (one, other)
        )
    # boundary: foreign model code; whatever it raises, the answer is that this trainer cannot train it
    except Exception as error:
        raise TrainerError(
            f"a model of the family {kind!r} does not run as a causal language model: {error}"
        ) from error
    if not torch.allclose(logits, moved, rtol=0.0, atol=CAUSAL_GAP * float(logits.abs().max())):
        raise TrainerError(
            f"in this model of the family {kind!r} a token looks at later ones, so it is no causal language model; use a "
            "decoder (some families have is_decoder=true in config.json for it)"
        )
