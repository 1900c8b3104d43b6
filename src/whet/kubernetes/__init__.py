"""Training jobs on Kubernetes: manifests from one plan, and their way to a cluster."""
