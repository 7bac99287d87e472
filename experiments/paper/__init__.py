"""The tables and figures of the paper (arXiv 2510.18358), each by one command: `python -m experiments.paper --list`."""
