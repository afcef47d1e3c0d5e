"""Arrow Flight as a carrier of opaque messages: long-lived DoExchange streams for records, DoAction for calls."""
