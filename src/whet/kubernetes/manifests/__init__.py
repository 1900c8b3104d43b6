"""A plan as Kubernetes objects: pure functions from the plan to plain dicts."""
