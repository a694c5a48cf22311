"""Five kinds of end of a pod, as processes in namespaces: `python -m benchmarks.pods`."""
