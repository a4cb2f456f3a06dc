public class Main {
  static volatile int x;
  public static void main(String[] args) { while (true) x++; }
}
