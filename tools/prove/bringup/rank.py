"""The process of one rank that rank 0 of a bring-up starts: it runs all collectives alone before it loads anything."""

from __future__ import annotations

from ...ranks import rank
from .collectives import collectives_check


def main() -> None:
    """Runs the rank that the command line names."""
    rank.main(obj=collectives_check)


if __name__ == "__main__":
    main()
