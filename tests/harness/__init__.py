"""hardkv as a model of lm-evaluation-harness; what needs that library is skipped where it is not installed."""
