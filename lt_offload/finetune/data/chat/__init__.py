"""Conversations: from rows to messages, through a chat template to text, and the assistant's part of it."""
