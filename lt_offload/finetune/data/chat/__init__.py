"""Conversations: from rows to messages, through a chat template to text, and which part of it is the assistant's."""
