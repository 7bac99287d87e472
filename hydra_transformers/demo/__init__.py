"""The whole story on handwritten digits, without a download: `python -m hydra_transformers.demo`."""
