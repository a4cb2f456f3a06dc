public class Main { static int x; }
