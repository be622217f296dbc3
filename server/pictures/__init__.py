"""Pictures of requests: bytes that a client sent, decoded within limits and cut into the patches that a vision tower reads."""
