"""Adapters on the device."""
