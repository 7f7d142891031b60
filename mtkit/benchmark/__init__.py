"""What attention, training and decoding cost on this machine, and beside other programs."""
