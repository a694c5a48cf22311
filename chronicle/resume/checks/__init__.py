"""What the guard compares, and how a difference becomes a failed check with its likely cause. No torch, no disk."""
