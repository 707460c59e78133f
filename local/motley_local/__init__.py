"""A Kubernetes cluster on one Linux machine: a real control plane, virtual GPU nodes, and pods as processes.

For laptops and continuous integration; nothing here is meant to serve a production run.
"""
