"""Rows of `inference.csv` as cases that the inference model can be asked about.

Owns: the one rule for every field that a row leaves out, and the reason why a row is not scored. No rule looks at the
measured value. The rules:

* degrees: `tp`, `pp`, `ep`, `dp` as given. Without `tp` and `ep`, tp is the smallest power of two for which the weights take
  at most 60 % of the memory; what is left of `num_gpus` are replicas. With `ep` above 1, tp missing is 1 and dp missing is
  `ep`. Where the row says that attention is data parallel, tp ranks become dp = ep = tp.
* precision: as written, `X (CHIP: Y)` is Y on that chip; missing: bf16. KV cache: as given, else by the engine's habit.
* lengths: as given; `mean` in the text or a data set makes them varied. Missing ones are those of the data set (DATASETS),
  else 512 and 256 tokens. A stated mean above the data set's is of its longer answers: all are longer by the difference.
* number of requests: as given, else a steady state. Rate: as given, else all at once. Limit of sequences: as given, else the
  engine's default. Requests, rate and concurrency are those of all replicas together. MLPerf's Server scenario looks for the
  highest rate that its limits of latency allow: that rate is a result, and the engine is full.
* statistic: as given, else the mean; of the distance of tokens the median (the field `median_itl_ms` of the serving benchmark
  is what tables call inter-token latency, as the scripts of the Lambda tables show).
"""

from __future__ import annotations

import csv
import hashlib
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rollart.core.errors import ConfigError
from rollart.core.resources import Degrees
from rollart.perf.calibrated import Calibration, pair_key
from rollart.perf.devices import GIB, Device, device
from rollart.perf.engines import EngineFacts, engine_facts
from rollart.perf.inference import EngineCost
from rollart.perf.rooflines import WEIGHT_BYTES, Efficiency
from rollart.perf.serving import Served, Server, Workload, serve
from rollart.perf.shapes import ModelShape, model_shape

DATASETS = (
    ("gsm8k", 300.0, 146.0, 1), ("openorca", 295.0, 290.0, 1), ("cnn", 870.0, 69.0, 4), ("dailymail", 870.0, 69.0, 4),
    ("sharegpt", 220.0, 195.0, 1), ("benchmark_serving", 220.0, 195.0, 1), ("bench_serving", 220.0, 195.0, 1),
)  # fmt: skip
"""Mean prompt and answer, and beams, of public data sets as their usual loaders cut them (MLPerf, filtered ShareGPT)."""
USUAL_LENGTHS = (512.0, 256.0, 1)
WEIGHTS_AT_MOST = 0.6
QUANTILES = {"median": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99}
MetricClass = Literal["throughput", "tpot", "itl", "ttft", "e2e", "tail"]


class Unscored(Exception):
    """Why a row is left out of the score."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What a row asks. `group` is the configuration; rows of one configuration stay on one side of a split."""

    row_id: str
    suite: str
    group: str
    digest: str
    engine: str
    device: Device
    shape: ModelShape
    facts: EngineFacts
    degrees: Degrees
    replicas: float
    precision: str
    kv_dtype: str
    workload: Workload
    max_sequences: float
    max_step_tokens: float
    metric: MetricClass
    quantile: float | None
    """None: the mean."""
    statistic: str
    per_token: float
    """What a throughput counts for each output token: 1, a share of a request, or prompt tokens too."""
    target: float
    """Throughput of all devices, or seconds."""

    @property
    def pair(self) -> str:
        return pair_key(self.engine, self.device.name)

    @property
    def run(self) -> tuple[object, ...]:
        """What two rows of one measured run have in common."""
        return (
            self.pair, self.shape.name, self.facts.name, self.facts.steps_per_schedule, self.facts.mixed, self.degrees,
            self.precision, self.kv_dtype, self.workload, self.max_sequences, self.max_step_tokens,
        )  # fmt: skip

    def serve(self, efficiency: Efficiency, factor: float) -> Served:
        """What the model says of the run. Raises `Unscored` where the model does not fit by the rules above."""
        cost = EngineCost(
            device=self.device, shape=self.shape, degrees=self.degrees, precision=self.precision, kv_dtype=self.kv_dtype,
            efficiency=efficiency, factor=factor, memory_fraction=self.facts.memory_fraction, of_free=self.facts.of_free,
            runtime_bytes=self.facts.runtime_gib * GIB, step_tokens=self.max_step_tokens or self.facts.max_step_tokens,
        )  # fmt: skip
        server = Server(
            cost=cost, facts=self.facts, max_sequences=self.max_sequences, max_step_tokens=self.max_step_tokens
        )
        try:
            return serve(server, self.workload)
        except ConfigError as error:
            raise Unscored(f"does not fit: {error}") from error

    def read(self, served: Served) -> float:
        """The figure that the row measured."""
        if self.metric == "throughput":
            return served.tokens_per_s * self.replicas * self.per_token
        if self.metric in ("tpot", "tail"):
            return served.tpot_s if self.quantile is None else served.tpot_quantile_s(self.quantile)
        if self.metric == "itl":
            return served.median_itl_s if self.statistic == "median" else served.mean_itl_s
        return served.ttft_s(self.quantile) if self.metric == "ttft" else served.e2e_s(self.quantile)

    def predict(self, calibration: Calibration, *, calibrated: bool = True) -> float:
        factor = calibration.factor(self.engine, self.device.name) if calibrated else 1.0
        return self.read(self.serve(calibration.efficiency, factor))


def number(text: str) -> float | None:
    """The number that a text begins with: `1,024`, `8K` (8,192), `857.5 mean`."""
    found = re.match(r"\s*(\d+(?:\.\d+)?)\s*(k\b)?", (text or "").replace(",", ""), re.IGNORECASE)
    return float(found[1]) * (1024.0 if found[2] else 1.0) if found else None


def _rate(row: Mapping[str, str]) -> float | None:
    """Requests a second where the row has a number of them, `10`, and they were not what was looked for."""
    if "mlperf" in row.get("suite", "").lower() and row.get("scenario", "").strip().lower() == "server":
        return None
    return number(re.sub(r"^[^\d]*", "", row.get("request_rate", "")))


def _precision(text: str, chip: str) -> str:
    for where, what in re.findall(r"(\w+):\s*(\w+)", text):
        if re.search(rf"\b{where.lower()}\b", chip.lower()):
            text = what
    plain = re.sub(r"\(.*?\)", "", text).strip().lower()
    word = re.match(r"(nvfp4|mxfp4|fp4|fp8|int8|int4|bf16|fp16|fp32)", plain)
    return {"nvfp4": "fp4", "mxfp4": "fp4", "int4": "fp4"}.get(word[1], word[1]) if word else "bf16"


def _kv_dtype(text: str, precision: str, facts: EngineFacts) -> str:
    given = text.strip().lower()
    if given.startswith(("fp8", "int8")):
        return "fp8"
    if given and given != "auto":
        return "bf16"
    return "fp8" if facts.kv_follows_weights and WEIGHT_BYTES[precision] < 2.0 else "bf16"


def _fewest_ranks(shape: ModelShape, chip: Device, precision: str, most: int) -> int:
    tp = 1
    while tp < most:
        weights = EngineCost(device=chip, shape=shape, degrees=Degrees(tp=tp), precision=precision).weight_bytes()
        if weights <= WEIGHTS_AT_MOST * chip.memory_bytes:
            break
        tp *= 2
    return tp


def _degrees(row: Mapping[str, str], shape: ModelShape, chip: Device, precision: str) -> tuple[Degrees, float]:
    tp, pp, ep, dp = (int(number(row.get(key, "")) or 0) for key in ("tp", "pp", "ep", "dp"))
    gpus = int(number(row.get("num_gpus", "")) or 0) or max(tp, 1) * max(pp, 1) * max(dp, 1)
    notes = row.get("notes", "").lower()
    if not tp and ep <= 1:
        tp = _fewest_ranks(shape, chip, precision, max(gpus // max(pp, 1) // max(dp, 1), 1))
    if (
        shape.experts
        and ep <= 1
        and dp <= 1
        and tp > 1
        and ("attention-dp" in notes or "attention data parallel" in notes)
    ):
        tp, ep, dp = 1, tp, tp
    if ep > 1 and not dp:
        dp = max(ep // max(tp, 1), 1)
    degrees = Degrees(tp=max(tp, 1), pp=max(pp, 1), dp=max(dp, 1) if ep > 1 else 1, ep=max(ep, 1))
    used = degrees.tp * degrees.pp * degrees.dp
    return degrees, max(gpus / used, 1.0)


def _workload(row: Mapping[str, str], replicas: float) -> Workload:
    text = " ".join((row.get("workload", ""), row.get("scenario", ""))).lower()
    isl, osl = row.get("isl", ""), row.get("osl", "")
    known = next((figures for word, *figures in DATASETS if word in text), None)
    prompt, answer, beams = known or USUAL_LENGTHS
    varied = known is not None or "mean" in isl or "mean" in osl
    limit = row.get("concurrency_or_max_num_seqs", "").lower()
    concurrency = number(re.sub(r"^\D*", "", limit)) if "concurren" in limit else None
    stated = number(osl) or answer
    return Workload(
        prompt=number(isl) or prompt, answer=stated, lengths="varied" if varied else "fixed",
        requests=max((number(row.get("num_requests", "")) or math.inf) / replicas, 1.0),
        rate_per_s=(_rate(row) or math.inf) / replicas, concurrency=max((concurrency or math.inf) / replicas, 1.0),
        beams=int(beams), shortest=max(stated - answer, 0.0) if known else 0.0,
    )  # fmt: skip


def _limits(row: Mapping[str, str]) -> tuple[float, float]:
    text = row.get("concurrency_or_max_num_seqs", "").lower()
    named = re.search(r"max[-_ ]num[-_ ]seqs\D{0,3}(\d+)", text)
    sequences = float(named[1]) if named else (number(text) or 0.0) if "concurren" not in text else 0.0
    tokens = re.search(r"max_num_batched_tokens\D{0,3}(\d+)", row.get("scenario", "").lower())
    return sequences, float(tokens[1]) if tokens else 0.0


def _metric(row: Mapping[str, str], max_step_tokens: float) -> tuple[MetricClass, float | None, str]:
    name = row["metric"].lower()
    statistic = next((word for word in QUANTILES if word in name), "mean")
    quantile = QUANTILES.get(statistic)
    if "throughput" in name:
        return "throughput", quantile, statistic
    if "ttft" in name:
        if _rate(row) is None or not max_step_tokens:
            raise Unscored("TTFT without a rate or scheduler settings")
        return "ttft", quantile, statistic
    tail = (quantile or 0.0) > 0.5
    if "tpot" in name:
        return "tail" if tail else "tpot", quantile, statistic
    if "itl" in name or "inter-token" in name:
        return "tail" if tail else "itl", quantile, "mean" if "mean" in name else "median"
    if "e2e" in name or "latency" in name:
        if not max_step_tokens and tail:
            raise Unscored("a tail of end-to-end latency without scheduler settings")
        return "e2e", quantile, statistic
    raise Unscored(f"metric {row['metric']!r} is not modelled")


def _per_token(row: Mapping[str, str], workload: Workload) -> float:
    name, unit = row["metric"].lower(), row.get("unit", "").lower()
    if "request" in name or unit.startswith("req"):
        return 1.0 / workload.answer
    if "output" in name or "generat" in name:
        return 1.0
    if "total" in name or "input" in name:
        return (workload.answer + workload.prompt) / workload.answer - (0.0 if "total" in name else 1.0)
    return 1.0


def case_of(row: Mapping[str, str]) -> Case:
    """The case of a row. Raises `Unscored` with the reason."""
    target = number(row.get("value", ""))
    if not target:
        raise Unscored("no measured value")
    try:
        chip, shape = device(row["gpu"]), model_shape(row["model"])
    except ConfigError as error:
        raise Unscored(str(error).split(";")[0]) from error
    facts = engine_facts(row["engine"], row.get("engine_version", ""))
    precision = _precision(row.get("precision", ""), row["gpu"])
    degrees, replicas = _degrees(row, shape, chip, precision)
    sequences, tokens = _limits(row)
    metric, quantile, statistic = _metric(row, tokens)
    workload = _workload(row, replicas)
    unit, scope = row.get("unit", "").lower(), row.get("scope", "").lower()
    scale = 1e-3 if unit.startswith("ms") else 1.0
    if metric == "throughput" and ("gpu" in unit or scope == "per gpu"):
        scale = number(row["num_gpus"]) or degrees.tp * degrees.pp * degrees.dp
    group = "|".join(row.get(key, "") for key in ("suite", "engine", "model", "gpu", "num_gpus", "tp", "ep"))
    content = "|".join(
        f"{key}={value}" for key, value in sorted(row.items()) if key not in ("row_id", "notes", "source")
    )
    return Case(
        row_id=row.get("row_id", ""), suite=row.get("suite", "inference.csv"), group=group,
        digest=hashlib.blake2b(content.encode(), digest_size=5).hexdigest(), engine=row["engine"], device=chip, shape=shape,
        facts=facts, degrees=degrees, replicas=replicas, precision=precision,
        kv_dtype=_kv_dtype(row.get("kv_cache_dtype", ""), precision, facts), workload=workload,
        max_sequences=sequences, max_step_tokens=tokens, metric=metric, quantile=quantile, statistic=statistic,
        per_token=_per_token(row, workload), target=target * scale,
    )  # fmt: skip


def read_cases(folder: Path) -> Iterator[tuple[str, Case | Unscored]]:
    """Row id and case, or the reason why there is none, of every row of `folder/inference.csv`."""
    with (folder / "inference.csv").open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            try:
                yield row.get("row_id", ""), case_of(row)
            except Unscored as reason:
                yield row.get("row_id", ""), reason
