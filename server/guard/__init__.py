"""Who may talk to the server, and how much each client may ask for."""
