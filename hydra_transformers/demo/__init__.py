"""The whole story on handwritten digits, without a download: `hydra-transformers demo`."""
