"""What summation services and communication services share: how one listens to others, and what it counts."""
