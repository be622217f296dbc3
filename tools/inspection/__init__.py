"""What an artifact holds, as text: its graphs, costs, legality and memory, and what two of them differ in."""
