"""What the devices do: utilisation, power, temperature, peak arithmetic."""
