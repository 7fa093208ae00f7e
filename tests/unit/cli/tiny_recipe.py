"""A simulated job of seconds, as a file says it: for tests of commands."""

from __future__ import annotations

from pathlib import Path

TINY = """
name: tiny
world: {kind: virtual}
model: {kind: shape, name: qwen3-8b}
engine: {kind: modelled}
tasks:
  math: {env: {kind: workload, name: math}, max_tokens: 512, size: 64}
schedule: {steps: 3, batch: 8, group_size: 4, max_staleness: 1}
cluster:
  pools:
    h800: {device: H800, devices_per_node: 8, roles: [train]}
    h20: {device: H20, devices_per_node: 2, nodes: NODES, roles: [mixed]}
"""


def tiny_recipe(folder: Path, *, nodes: int = 1) -> Path:
    """The file, in that folder, with so many nodes that sample; runs go into another one beside it."""
    path = folder / "tiny.yaml"
    path.write_text(f"{TINY.replace('NODES', str(nodes))}output_dir: {folder / 'runs'}\n", encoding="utf-8")
    return path
