"""Runs as one page to look at: curves, frontiers, experts and text under a dial that moves (`grmoe report`)."""

from grmoe.report.collect import Content, collect
from grmoe.report.page import render

__all__ = ["Content", "collect", "render"]
