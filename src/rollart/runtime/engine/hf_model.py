"""Any causal language model of transformers, by its own definition, over the engine's slotted cache.

Owns the forward pass beside the fast path. Invariants: logits are those of the model's own forward on the whole sequence up to
rounding; a configuration whose cache or attention this engine would get wrong is refused by name. Each group of a batch is
one call of the model on a rectangle of rows; keys and values pass through `SlotCache`, which stores them in the rows' slots and
hands the whole history back.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, Cache, PreTrainedModel
from transformers.initialization import no_init_weights

from rollart.core.errors import EngineError
from rollart.runtime.definition import attention_of
from rollart.runtime.engine.batch import Batch, Group
from rollart.runtime.engine.cache import KVCache
from rollart.runtime.engine.named_weights import NamedWeights

FULL, SLIDING = "full_attention", "sliding_attention"
NEEDED = ("vocab_size", "num_hidden_layers", "max_position_embeddings")
"""Of a configuration, under these names or as it maps them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HFSizes:
    """`shape.Sizes` of a model, as its own cache has them."""

    layers: int
    kv_heads: int
    head_dim: int
    vocab: int
    max_positions: int


def sizes_of(config: Any) -> HFSizes:
    """What the model of a transformers configuration keeps per token, found by running it on no memory (device `meta`) with
    the arguments of `HFDecoder`: a prompt of two tokens, then one more.

    Raises EngineError for a model that this engine's cache cannot hold, or whose attention masks it does not know.
    """
    kind = getattr(config, "model_type", None)
    _check_masks(config)
    lacking = [name for name in NEEDED if not isinstance(getattr(config, name, None), int)]
    if lacking:
        raise EngineError(
            f"model_type={kind!r} has no {' and no '.join(lacking)} in its configuration; this engine runs models that say "
            f"{', '.join(NEEDED)}"
        )
    try:
        kept, state = _tried(config)
    # boundary: foreign model code; whatever it raises, the answer is that this engine cannot run it
    except Exception as error:
        raise EngineError(
            f"model_type={kind!r} does not run as a causal language model with a cache: {error}"
        ) from error
    sizes = set(kept.values())
    if len(sizes) != 1 or len(kept) != config.num_hidden_layers:
        raise EngineError(
            f"model_type={kind!r} keeps {sorted(sizes)} over {len(kept)} of {config.num_hidden_layers} layers; this "
            "engine holds models whose layers all keep keys and values of one size"
        )
    if state:
        raise EngineError(
            f"model_type={kind!r} has {len(state)} tensors in its state that are no parameters, among them {min(state)!r}; "
            "they do not travel with the weights"
        )
    heads, head_dim = sizes.pop()
    return HFSizes(
        layers=len(kept),
        kv_heads=heads,
        head_dim=head_dim,
        vocab=config.vocab_size,
        max_positions=config.max_position_embeddings,
    )


def _tried(config: Any) -> tuple[dict[int, tuple[int, int]], set[str]]:
    """Heads and their size of what each layer keeps; names in the state that are not those of parameters."""
    with torch.device("meta"):
        model = _build(config, torch.float32)
        cache, window = _TriedCache(), _window(config)
        keeps = {"logits_to_keep": torch.arange(1)} if _keeps_logits(model) else {}
        for past, width in ((0, 2), (2, 1)):
            mask = torch.zeros(1, 1, width, past + width)
            model(
                input_ids=torch.zeros(1, width, dtype=torch.int64),
                position_ids=torch.arange(past, past + width)[None],
                attention_mask=mask if window is None else {FULL: mask, SLIDING: mask},
                past_key_values=cache,
                use_cache=True,
                **keeps,
            )
    parameters = dict(model.named_parameters(remove_duplicate=False))
    return cache.kept, model.state_dict().keys() - parameters.keys()


class ModuleWeights(NamedWeights):
    """A model whose parameters are filled by `put`."""

    def __init__(self, config: Any, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(str(config.model_type), dtype)
        module: nn.Module = _build(config, dtype)
        self.model = module.to(device)
        self.keeps_logits = _keeps_logits(self.model)
        """Whether the model can leave out logits that nobody wants."""
        where = {}
        for name, parameter in self.model.named_parameters():
            self._name(name, parameter.data)
            where[parameter.data_ptr()] = name
        state = self.model.state_dict()
        self.aliases = {name: where[state[name].data_ptr()] for name in state.keys() - set(self.named)
                        if state[name].data_ptr() in where}  # fmt: skip
        self.missing = set(self.named)


class HFDecoder:
    """Stateless. The same interface as the fast path's decoder."""

    def __init__(self, config: Any, stairs: Tensor) -> None:
        """`stairs`: the staircase that masks are cut from."""
        self._stairs = stairs
        self._window = _window(config)

    def forward(self, weights: ModuleWeights, cache: KVCache, batch: Batch) -> Tensor | None:
        """Write keys and values of all tokens; logits (complete rows, vocab), or None when no row is complete."""
        parts = [self._group(weights, cache, batch, group) for group in batch.groups]
        if batch.last is None:
            return torch.cat(parts) if batch.last_groups else None
        # `last` is in an order of its own; the parts are in the order of the tokens.
        order = batch.last.argsort().argsort()
        return torch.cat(parts).index_select(0, order)

    def _group(self, weights: ModuleWeights, cache: KVCache, batch: Batch, group: Group) -> Tensor:
        """Logits of those of the group's tokens that are wanted, (n, vocab), in the order of the tokens."""
        ids, positions = batch.ids[group.tokens], batch.positions[group.tokens]
        if group.spread is not None:
            ids, positions = ids.index_select(0, group.spread), positions.index_select(0, group.spread)
        rows, width = group.rows, group.width
        slots = SlotCache(cache, batch, group)
        columns = places = None
        if batch.last is not None:
            wanted = (batch.last >= group.tokens.start) & (batch.last < group.tokens.stop)
            tokens = batch.last[wanted].sort().values - group.tokens.start
            places = tokens if group.collect is None else group.collect.index_select(0, tokens)
            columns, column = (places % width).unique(return_inverse=True)
        keep: dict[str, Any] = {}
        if columns is not None and weights.keeps_logits:
            # At least one: an empty index is "all" to some models.
            keep["logits_to_keep"] = columns if len(columns) else 1
        logits: Tensor = weights.model(
            input_ids=ids.long().view(rows, width),
            position_ids=positions.view(rows, width),
            attention_mask=self._masks(positions, group),
            past_key_values=slots,
            use_cache=True,
            **keep,
        ).logits
        if columns is None or places is None:
            flat = logits.reshape(rows * width, -1)
            return flat if group.collect is None else flat.index_select(0, group.collect)
        return logits[places // width, column if keep else places % width]

    def _masks(self, positions: Tensor, group: Group) -> Tensor | dict[str, Tensor]:
        """(rows, 1, width, reach), 0 or -inf; a model with sliding layers gets both kinds by name."""
        full = group.mask
        if full is None:
            full = self._stairs.new_zeros(1).expand(group.rows, 1, group.width, group.reach)
        if self._window is None:
            return full
        keys = torch.arange(group.reach, device=positions.device)
        past = keys <= positions.view(group.rows, 1, group.width, 1) - self._window
        return {FULL: full, SLIDING: full.masked_fill(past, float("-inf"))}


class SlotCache(Cache):
    """transformers' view of the slots of one group, for one forward pass."""

    def __init__(self, cache: KVCache, batch: Batch, group: Group) -> None:
        super().__init__(layers=[])
        self._cache, self._group = cache, group
        heads = len(batch.write) // len(batch.ids)
        self._write = batch.write[group.tokens.start * heads : group.tokens.stop * heads]

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        """Store (rows, kv_heads, width, head_dim) of the tokens that exist; keys and values of the whole history."""
        group = self._group
        keys, values = (part.transpose(1, 2).flatten(0, 1) for part in (key_states, value_states))
        if group.collect is not None:
            keys, values = keys.index_select(0, group.collect), values.index_select(0, group.collect)
        self._cache.write(layer_idx, self._write, keys, values)
        return self._cache.read(layer_idx, group.memory, group.reach)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._group.reach - self._group.width


class _TriedCache(Cache):
    """What a model sees of `SlotCache`; notes what it is given to keep."""

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.kept: dict[int, tuple[int, int]] = {}
        """Layer -> (heads, size of a head)."""
        self._parts: dict[int, tuple[Tensor, Tensor]] = {}

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        if key_states.shape != value_states.shape:
            raise EngineError(f"keys of {tuple(key_states.shape[1:])} and values of {tuple(value_states.shape[1:])}")
        _, heads, _, head_dim = key_states.shape
        self.kept[layer_idx] = heads, head_dim
        given, before = (key_states, value_states), self._parts.get(layer_idx)
        parts = given if before is None else tuple(torch.cat(both, 2) for both in zip(before, given, strict=True))
        self._parts[layer_idx] = (parts[0], parts[1])
        return parts

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._parts[layer_idx][0].shape[2] if layer_idx in self._parts else 0


def _build(config: Any, dtype: torch.dtype) -> PreTrainedModel:
    """The model with parameters that hold anything, buffers computed."""
    with no_init_weights():
        model: PreTrainedModel = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            config, dtype=dtype, attn_implementation=attention_of(config)
        )
    model.tie_weights()
    model.train(mode=False)
    model.requires_grad_(False)
    return model


def _keeps_logits(model: nn.Module) -> bool:
    return "logits_to_keep" in inspect.signature(model.forward).parameters


def _window(config: Any) -> int | None:
    """Tokens that a sliding layer looks back over; None: no layer slides."""
    slides = SLIDING in (getattr(config, "layer_types", None) or ())
    window: int | None = getattr(config, "sliding_window", None) if slides else None
    return window


def _check_masks(config: Any) -> None:
    kinds = set(getattr(config, "layer_types", None) or ())
    window, most = getattr(config, "sliding_window", None), getattr(config, "max_position_embeddings", None)
    if kinds - {FULL, SLIDING}:
        raise EngineError(
            f"{config.model_type} model with layer_types {sorted(kinds)}: this engine knows {FULL} and {SLIDING}"
        )
    if not kinds and window is not None and most is not None and window < most:
        raise EngineError(
            f"{config.model_type} model with sliding_window={window} and no layer_types: this engine cannot tell which "
            f"layers slide; set sliding_window to None or to {most} or more"
        )
