"""What probes, Prometheus and browsers read: health, metrics and the chat page."""
