"""The way to a cluster: objects are created, examined and deleted through the official Python client."""
