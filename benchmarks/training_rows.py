"""Published training rows as plans: the one rule for every missing field, shared by `fit_training.py` and
`validate_training.py`.

A field that a row does not state is filled without looking at the measured time: heads: hidden / 128 (64 below
1,537); feed-forward: 4 x hidden; vocabulary: 51,200; sequence: 2,048; dp: devices / (tp pp cp); replicated where no
sharding is named; sequence parallelism: where tp > 1 and the framework has it; global batch: one micro-batch a stage
and replica; recomputation: the least (none, selective, all of a quarter of the layers, half, ..) that fits the
device's memory; micro-batch and virtual stages: those that the model itself predicts to be fastest among the plans
that fit (authors tune what they do not state). A name with a public configuration takes its shape from there where
the row's numbers do not contradict it.
"""

from __future__ import annotations

import csv
import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from rollart.core.errors import ConfigError
from rollart.perf.devices import Device, device
from rollart.perf.links import Fabric, chip_name, fabric
from rollart.perf.pipeline import Schedule
from rollart.perf.shapes import ModelShape, gpt_shape, model_shape
from rollart.perf.train_calibration import scale_key
from rollart.perf.train_layers import TrainingLaw
from rollart.perf.train_plan import Framework, Recompute, TrainingPlan, framework
from rollart.perf.training import StepTime, fastest, fitting_plans

FILES = ("training.csv", "training_single_node.csv")
DEFAULT_VOCAB = 51_200
DEFAULT_SEQUENCE = 2_048
FALLBACK_DEVICE = "A100 SXM 80GB"
"""A device that no table knows is priced as this one; its constant is the default."""
FOLDS = 5
SETTING = (
    "model", "hidden", "layers", "heads", "seq_len", "gpu", "num_gpus", "tp", "pp", "vpp", "cp", "ep", "sharding",
    "global_batch", "micro_batch", "precision", "recompute", "framework", "inter_node_bw",
)  # fmt: skip
MICRO_BATCHES = (1, 2, 4, 8, 16)
RECOMPUTE: tuple[Recompute, ...] = ("none", "selective", "full")
ANY_RECOMPUTE: list[tuple[Recompute, float]] = [
    ("none", 1.0), ("selective", 1.0), ("full", 0.25), ("full", 0.5), ("full", 0.75), ("full", 1.0),
]  # fmt: skip
Row = Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A row that can be predicted: every plan that its missing fields allow, and what was measured."""

    row: str
    suite: str
    measured_s: float
    model: ModelShape
    plans: tuple[TrainingPlan, ...]
    device: Device
    fabric: Fabric
    framework: Framework
    framework_name: str
    chip: str
    setting: str
    """All that the row states but its id, its release and what was measured."""

    @property
    def key(self) -> str:
        """Name of the constant that the row shares with all rows of its framework and chip."""
        return scale_key(self.framework_name, self.chip)

    def predict(self, law: TrainingLaw) -> StepTime:
        """The fastest of the plans that fit, without the constant of its framework and device."""
        return fastest(self.model, self.plans, self.device, self.fabric, self.framework, law)


def suite_name(row: Row, file: str) -> str:
    """`system_or_paper` without a release number, so that releases of one product are one suite; else the file's
    name.
    """
    name = row.get("system_or_paper") or Path(file).stem
    return re.sub(r"\s+v?\d{2,4}\.\d{2}(\.\d+)?$", "", name).strip()


def number(row: Row, field: str, default: float = 0.0) -> float:
    """A numeric field, `default` where it is missing or not a number."""
    try:
        return float(row.get(field) or default)
    except ValueError:
        return default


def target_s(row: Row) -> float:
    """Measured seconds: `iter_time_s`, else `derived_iter_time_s`, else 0."""
    return number(row, "iter_time_s") or number(row, "derived_iter_time_s")


def shape_of(row: Row) -> ModelShape | None:
    """The model: its public configuration, else the row's numbers, else None."""
    hidden, layers = int(number(row, "hidden")), int(number(row, "layers"))
    try:
        public = model_shape(row.get("model", ""))
    except ConfigError:
        public = None
    if public and (not hidden or (public.hidden, public.layers) == (hidden, layers)):
        return public
    if not hidden or not layers:
        return None
    heads = int(number(row, "heads")) or max(1, hidden // (128 if hidden > 1536 else 64))
    vocab = int(number(row, "vocab", DEFAULT_VOCAB))
    return gpt_shape(layers=layers, hidden=hidden, heads=heads, vocab=vocab, ffn=int(number(row, "ffn_hidden")))


def device_of(row: Row) -> tuple[Device, str]:
    """The device and the name of its chip, under which its constant stands."""
    plain = re.sub(r"\(.*?\)", " ", row.get("gpu", "")).strip()
    try:
        found = device(row.get("gpu", ""))
    except ConfigError:
        return device(FALLBACK_DEVICE), plain
    return found, chip_name(plain) or found.name


def fabric_of(row: Row, chip: str) -> Fabric:
    """The fabric of the row: table of links, with the network that the row states per device or per node."""
    found = fabric(chip, "")
    per_node = max(1, int(number(row, "gpus_per_node", 8)))
    text = row.get("inter_node_bw", "")
    stated = re.search(r"(?:(\d+)\s*x\s*)?(\d+(?:\.\d+)?)\s*([GT])b?(?:/s|ps)?\b", text)
    if stated:
        total = float(stated[2]) * (1e12 if stated[3] == "T" else 1e9) / 8
        cards = int(stated[1]) if stated[1] else (1 if re.search("per (node|server)", text) else per_node)
        found = replace(found, inter_bytes_per_s=total * cards / per_node)
    domain = found.domain if found.domain > 8 else min(found.domain, per_node)
    return replace(found, domain=max(1, domain))


def dtype_of(row: Row) -> str:
    """The dtype of the linear layers."""
    text = row.get("precision", "").lower()
    for words, dtype in (
        (("fp4",), "fp4"),
        (("fp8", "float8"), "fp8"),
        (("bf16", "fp16"), "bf16"),
        (("fp32", "tf32"), "tf32"),
    ):
        if any(word in text for word in words):
            return dtype
    return "bf16"


def shards_of(row: Row) -> int:
    """The ZeRO stage that the row's sharding means."""
    text = row.get("sharding", "").lower()
    for words, stage in (
        (("zero-3", "full_shard", "fsdp"), 3),
        (("zero-2", "shard_grad_op"), 2),
        (("zero-1", "dist-opt"), 1),
    ):
        if any(word in text for word in words):
            return stage
    return 0


def schedule_of(row: Row) -> Schedule:
    """The pipeline schedule."""
    text = row.get("pipeline_schedule", "").lower()
    for word, schedule in (("interleav", "interleaved"), ("zero", "zero_bubble"), ("zb", "zero_bubble"),
                           ("dualpipe", "dualpipe"), ("gpipe", "gpipe")):  # fmt: skip
        if word in text:
            return schedule  # type: ignore[return-value]
    return "interleaved" if number(row, "vpp") > 1 else "1f1b"


def plans_of(row: Row, model: ModelShape, works: Framework) -> tuple[TrainingPlan, ...]:
    """Every plan that agrees with what the row states."""
    degree = {name: max(1, int(number(row, name, 1))) for name in ("tp", "pp", "cp", "ep")}
    devices = int(number(row, "num_gpus", 1))
    dp = max(1, devices // (degree["tp"] * degree["pp"] * degree["cp"]))
    devices = dp * degree["tp"] * degree["pp"] * degree["cp"]
    stated = int(number(row, "micro_batch"))
    batch = int(number(row, "global_batch")) or max(1, stated) * dp * degree["pp"]
    local = max(1, batch // dp)
    micro = [stated] if stated else [size for size in MICRO_BATCHES if local % size == 0]
    schedule = schedule_of(row)
    chunks = [max(1, int(number(row, "vpp", 1)))]
    unsaid = schedule == "interleaved" or not row.get("pipeline_schedule")
    if unsaid and not number(row, "vpp") and degree["pp"] > 1 and "pipeline_schedule" in row:
        per_stage = -(-model.layers // degree["pp"])
        chunks = [size for size in range(1, per_stage + 1) if per_stage % size == 0]
    text = row.get("recompute", "").lower()
    repeats = [(name, 1.0) for name in RECOMPUTE if text.startswith(name)] or ANY_RECOMPUTE
    parallel = row.get("seq_parallel", "").lower()
    spread = parallel.startswith("y") if parallel else works.sequence_parallel and degree["tp"] > 1
    lora = "[lora]" in row.get("model", "").lower()
    return tuple(
        TrainingPlan(
            devices=devices, micro_batch=size, global_batch=batch, sequence=int(number(row, "seq_len", DEFAULT_SEQUENCE)),
            dp=dp, chunks=chunk, shards=shards_of(row), dtype=dtype_of(row), recompute=repeat, sequence_parallel=spread,
            schedule="interleaved" if chunk > 1 else schedule, recompute_share=share, lora=lora, **degree,
        )
        for size in micro for chunk in chunks for repeat, share in repeats
    )  # fmt: skip


def cases(folder: Path) -> tuple[list[Case], dict[str, int]]:
    """Rows of the folder that can be predicted, and how many cannot, by reason."""
    found: list[Case] = []
    unscored: dict[str, int] = {}
    for file, index, row in rows(folder):
        measured, model = target_s(row), shape_of(row)
        if measured <= 0 or model is None:
            reason = "no step time" if measured <= 0 else "no model shape in the row or a public configuration"
            unscored[reason] = unscored.get(reason, 0) + 1
            continue
        name = row.get("framework", "")
        works = framework(name)
        chosen, chip = device_of(row)
        plans = fitting_plans(model, plans_of(row, model, works), chosen, works)
        found.append(
            Case(
                row=row.get("row_id") or f"{file}:{index}", suite=suite_name(row, file), measured_s=measured, model=model,
                plans=plans, device=chosen, fabric=fabric_of(row, chip), framework=works,
                framework_name=name, chip=chip, setting=setting_of(row),
            )
        )  # fmt: skip
    return found, unscored


def setting_of(row: Row) -> str:
    """The fields of a row that say what was run, as one text."""
    return "|".join(f"{name}={row.get(name, '')}" for name in SETTING)


def fold_of(case: Case) -> int:
    """Fold of a row: rows that differ in nothing but release and measurement stay together."""
    text = f"{case.suite}|{case.setting}"
    return int(hashlib.sha256(text.encode()).hexdigest(), 16) % FOLDS


def data_digest(found: Iterable[Case]) -> str:
    """Digest of the rows of a folder, in their order: whether these are the rows that the constants were fitted
    on.
    """
    digest = hashlib.sha256()
    for case in found:
        digest.update(f"{case.row}|{case.suite}|{case.measured_s!r}".encode())
    return digest.hexdigest()


def rows(folder: Path) -> Iterator[tuple[str, int, Row]]:
    """(file, index, row) of every training file in the folder."""
    for file in FILES:
        path = folder / file
        if path.exists():
            with path.open(newline="", encoding="utf-8") as handle:
                for index, row in enumerate(csv.DictReader(handle)):
                    yield file, index, {key: value or "" for key, value in row.items() if key}
