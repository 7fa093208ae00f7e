"""What makes setting up environments slow: bad minutes that are drawn, and images that all hosts pull over one link.

Owns the two as options of a workload. Invariant: who is in a storm, whose image is cached and how large it is are drawn from
what they are for; only how fast a pull goes depends on who pulls at the same time. Each pull gets a fair share of the link, so
opening thousands of environments at once takes what all their images take together, and a cache ends that.

Source: RollArt (arXiv 2512.22560): resets of up to hundreds of seconds, caused by concurrent image pulls and contention on
hosts; with a mirror and a cache more than 99.99 % of resets take less than 60 s.
"""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import Field

from rollart.config.node import Node
from rollart.sim.laws import Law
from rollart.sim.shares import FairShare

STORM_INSTANCES = 64
"""Neighbouring instances that a storm hits or spares together: those of about one batch."""
GB = 1e9


class Storm(Node):
    """Bad minutes: in some epochs' batches a share of the resets takes very long, or fails."""

    chance: float = Field(default=0.0, ge=0, le=1)
    """That neighbouring instances, set up at about the same time, are in one."""
    share: Law
    """Of their resets, how many it hits."""
    seconds: Law
    fails: float = Field(default=0.0, ge=0, le=1)
    """Of those resets, how many fail."""


class ImagePulls(Node):
    """Images of environments, pulled from one place by all hosts."""

    gbyte: Law
    """Of one problem's image, as it travels."""
    link_gbyte_per_s: float = Field(gt=0)
    """Of the registry or mirror, all pulls together."""
    each_gbyte_per_s: float = Field(default=0.5, gt=0)
    """Most that one pull gets: a host's network and what it unpacks meanwhile."""
    cached: float = Field(default=0.0, ge=0, le=1)
    """Share of the environments that find their image on the host."""

    def pull(self, *, size: float, cached: float) -> Pull | None:
        """From two numbers in (0, 1): the image's place in the law of sizes, and whether this host has it."""
        if cached < self.cached:
            return None
        link = Link(bytes_per_s=GB * self.link_gbyte_per_s, each_bytes_per_s=GB * self.each_gbyte_per_s)
        return Pull(link=link, n_bytes=GB * self.gbyte.at(size))


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """What images come over; links of equal rates are one link."""

    bytes_per_s: float
    each_bytes_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Pull:
    """An image that one environment has to wait for."""

    link: Link
    n_bytes: float


class Links:
    """The links of one world, made when they are first used."""

    __slots__ = ("of",)

    def __init__(self) -> None:
        self.of: dict[Link, FairShare] = {}

    def share(self, link: Link) -> FairShare:
        found = self.of.get(link)
        if found is None:
            found = self.of[link] = FairShare(link.bytes_per_s, link.each_bytes_per_s)
        return found
