"""The carrier: frames over TCP. Calls with an answer, and long-lived streams of messages."""
