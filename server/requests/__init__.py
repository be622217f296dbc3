"""What clients send, validated, and what they are told when it is refused."""
