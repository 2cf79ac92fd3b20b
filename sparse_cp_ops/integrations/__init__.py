"""The package inside other libraries' models; each module needs its library and says so if it is missing."""
