"""Machines that libraries are built for: presets, this host, linking, devices."""
