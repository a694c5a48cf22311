"""MLflow, other journals and other tools: what a run sends to them and reads from them.

Heavy packages (mlflow) are imported inside functions; importing this package imports none of them.
"""
