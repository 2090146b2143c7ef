"""What delivered files were made from: written beside them, signed, shown, and checked again later."""
