"""Every field of the schema, in every variant, can be set by its dotted name on the command line."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from rollart.config.load import Known, resolve
from rollart.config.schema import PythonEnv, RunConfig, TaskConfig
from rollart.config.shape import ANY, Free, Key, walk
from rollart.core.errors import ConfigError

TASK = "probe"
COMPANIONS = {
    "frozen_lake": ("tasks.probe.size=1",),  # there is one default map
    "vllm": ("model.heads=2", "model.kv_heads=2", "model.max_positions=16"),  # vLLM has kernels for 32 a head, not 16
    "hf": ("tokenizer.template=chat",),  # a system message needs a chat
    "decoupled": ("algorithm.correction.kind=tis",),  # its ratio is not the one to the policy that sampled
    "gspo": ("algorithm.correction.kind=tis",),
    "none": ("schedule.max_staleness=0",),  # asynchronous training needs a correction
}
"""What a variant needs beside its own keys."""
POOL = ("cluster.pools.probe.device=H20", "cluster.pools.probe.roles=[mixed, train]", "schedule.max_staleness=0")
BESIDE = {
    "cluster.pools.": POOL,
    "schedule.colocated": ("schedule.max_staleness=0",),
    "cluster.devices.": tuple(
        f"cluster.devices.probe.{name}=1" for name in ("tflops", "memory_gib", "memory_gb_per_s", "link_gb_per_s")
    ),
}
"""What keys that begin so need beside them."""
LISTS = {"cluster.pools.probe.roles": "train, mixed", "affinity.tasks.probe.pools": "probe"}
"""Values of lists that cannot hold any word."""
TEXTS = ("another", r'"ab\n"', "SGLang")
"""Values for fields that take text; the second is an alphabet, the third an engine's name."""
STEPS = (1, 2, -1, -2, 4, 6, 8, 16, 24, 56)
"""Added to a number's default until a value passes that the rules across keys allow."""


def probed() -> RunConfig:
    return RunConfig(tasks={TASK: TaskConfig(env=PythonEnv(kind="python", entry="m:C"), size=10)})


KNOWN = Known(recipes={"probed": probed}, presets={})


def named(dotted: str) -> str:
    return dotted.replace(ANY, TASK)


def candidates(key: Key) -> Iterator[tuple[str, Any]]:
    """`(word, value)` pairs to try, none of them the default."""
    dotted, default = named(key.dotted), key.field.get_default(call_default_factory=True)
    if isinstance(key.shape, Free):
        yield f"{dotted}.key=[1, x]", {"key": [1, "x"]}
    elif key.shape.choices:
        for choice in key.shape.choices:
            if choice != default or len(key.shape.choices) == 1:
                yield f"{dotted}={choice}", choice
    elif key.shape.annotation is bool:
        yield f"{dotted}={'false' if default else 'true'}", not default
    elif key.shape.takes_text:
        for text in TEXTS:
            yield f"{dotted}={text}", "ab\n" if text.startswith('"') else text
    elif key.shape.annotation in (int, float):
        default = default if isinstance(default, int | float) else 1
        for step in STEPS:
            yield f"{dotted}={default + step}", default + step
        for share in (0.5, 0.25):
            yield f"{dotted}={default * share + 0.1}", default * share + 0.1
    else:
        words = LISTS.get(dotted, "one, two")
        yield f"{dotted}=[{words}]", tuple(words.split(", "))


def surroundings(key: Key) -> list[str]:
    """The words that choose the key's variants and fill what those require."""
    words = [f"{named(part)}.kind={kind}" for part, kind in key.kinds]
    words += [word for _, kind in key.kinds for word in COMPANIONS.get(kind, ())]
    beside = (word for start, needed in BESIDE.items() if key.dotted.startswith(start) for word in needed)
    if ("affinity", "table") in key.kinds:
        words += [*POOL, "affinity.tasks.probe.pools=[probe]"]
    words += [word for word in beside if not word.startswith(f"{named(key.dotted)}=")]
    for other in walk():
        inside = key.kinds and other.kinds[: len(key.kinds)] == key.kinds and len(other.kinds) == len(key.kinds)
        if (
            inside
            and other.field.is_required()
            and other.dotted != key.dotted
            and not other.dotted.endswith((".kind", ".pools"))
        ):
            amount = getattr(other.shape, "annotation", str) in (int, float)
            words.append(f"{named(other.dotted)}={1 if amount else 'filler'}")
    return [word for word in words if not word.startswith(f"{named(key.dotted)}=") or key.dotted.endswith(".kind")]


def value_at(config: RunConfig, dotted: str) -> Any:
    at: Any = config.model_dump()
    for part in dotted.split("."):
        at = at[part]
    return at


def accepted(words: Sequence[str]) -> bool:
    try:
        resolve("probed", words, known=KNOWN)
    except ConfigError:
        return False
    return True


KEYS = list(walk())


@pytest.mark.parametrize("key", KEYS, ids=[f"{key.dotted}{[kind for _, kind in key.kinds]}" for key in KEYS])
def test_every_field_can_be_set_by_its_dotted_name(key: Key) -> None:
    """Field case 38: in every variant, on the command line."""
    around = surroundings(key)
    working = [(word, value) for word, value in candidates(key) if accepted([*around, word])]
    assert working, f"none of {list(candidates(key))} is accepted beside {around}"
    word, value = working[0]
    resolved = resolve("probed", [*around, word], known=KNOWN)
    dotted = named(key.dotted)
    assert value_at(resolved.config, dotted) == value
    at = dotted if dotted in resolved.origins else f"{dotted}.key"
    assert str(resolved.origins[at]) == "command line"


def test_the_walk_over_the_schema_leaves_nothing_out() -> None:
    """What `walk` calls all keys is what pydantic's own JSON schema lists, key by key."""
    schema = RunConfig.model_json_schema()

    def keys(node: dict[str, Any], prefix: str) -> Iterator[str]:
        if "$ref" in node:
            node = schema["$defs"][node["$ref"].rsplit("/", 1)[1]]
        members = node.get("oneOf", node.get("anyOf"))
        if members and any("$ref" in member for member in members):
            for member in members:
                if "$ref" in member:
                    yield from keys(member, prefix)
        elif "properties" in node:
            for name, field in node["properties"].items():
                yield from keys(field, f"{prefix}.{name}")
        elif isinstance(node.get("additionalProperties"), dict):
            yield from keys(node["additionalProperties"], f"{prefix}.{ANY}")
        else:
            yield prefix.removeprefix(".")

    assert {key.dotted for key in KEYS} == set(keys(schema, ""))
