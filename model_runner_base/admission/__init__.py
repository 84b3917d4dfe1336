"""Admission: configs, requests and files that this library does not serve are refused here, before any work."""
