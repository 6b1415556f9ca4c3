"""What the router tells the outside: hooks that the logic calls, and adapters behind them."""
