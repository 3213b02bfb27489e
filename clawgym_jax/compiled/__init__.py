"""What the compiler made of a program: operations, memory and traffic, counted from its output."""
