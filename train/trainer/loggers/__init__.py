"""Where the figures of a run go while it trains: metrics.jsonl and run.json, the console, TensorBoard, W&B."""
