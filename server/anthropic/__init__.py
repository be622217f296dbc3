"""`/v1/messages`: Anthropic's API over the same chats."""
