"""The websocket endpoint."""
