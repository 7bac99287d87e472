"""The comparison on real data: from raw data and backbones to tables. See README.md."""
