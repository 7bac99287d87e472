"""A server in a process of its own."""

from hydra_transformers.cli import main


def serve(*words: str) -> None:
    main(["serve", *words])
